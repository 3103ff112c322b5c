// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "replay/clear_memory.hpp"
#include "replay/counters.hpp"
#include "replay/death_log.hpp"
#include "replay/samples.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {

/// What a replay ends with: for the terminal, for --report and for the exit code.
struct ReplayReport {
  ReplayCounters counters;
  std::uint64_t requests_given = 0;
  std::uint64_t skipped_lines = 0;
  std::vector<ClearMemory> clear_memory;
  std::vector<RunSample> samples;
  std::vector<RunDeath> deaths;
  std::uint64_t leaked_device_bytes = 0;
  std::uint64_t leaked_host_bytes = 0;
  std::vector<std::string> leftover_names;
  std::uint64_t restarts = 0;
  double duration_s = 0;
  bool started = false;  ///< Played at all: the first request was taken.
  std::string device;
  std::string geometry;
  std::uint32_t ranks = 1;
  std::uint32_t gpu_blocks = 0;
  std::uint32_t unit_blocks = 1;  ///< Of host memory; all counts are of GPU blocks.
  std::string name_space = "default";
  std::uint64_t host_memory_bytes = 0;
  std::string workload;
  std::string cache_owner;
  std::string arena_memory;
  std::string handles;
  std::string arena;
  std::string verify;
  std::string write_policy;
  std::string recompute = "never";
  std::string prefetch = "off";
  std::optional<std::string> error;  ///< Why it did not play to the end.
};

/// Sorted copies in, value at the rank out; 0 of nothing.
[[nodiscard]] double percentile(std::vector<double> values, double share);

[[nodiscard]] nlohmann::json to_json(const ReplayReport& report);
[[nodiscard]] ipc::Status write_report(const ReplayReport& report,
                                       const std::filesystem::path& file);
/// The table at the end.
[[nodiscard]] std::string summarize(const ReplayReport& report);
/// Every reason why the run counts as failed, in words; empty when it is good.
[[nodiscard]] std::vector<std::string> failures_of(const ReplayReport& report);

}  // namespace kvferry::cli
