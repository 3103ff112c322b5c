// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "rank_options.hpp"
#include "run_options.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace kvferry::cli {

/// A run of long contexts, as asked for.
struct LongctxConfig {
  std::string runtime_base;  ///< Empty: the default.
  std::string instance = "longctx";
  ipc::LogLevel log_level = ipc::LogLevel::kInfo;  ///< Of the processes.
  std::string log_dir;  ///< Empty: in the run's directory, removed at the end.
  std::string geometry_name;
  ipc::Geometry geometry;
  DeviceChoice devices;
  ArenaChoice arena;
  std::uint32_t context = 0;
  std::uint32_t sequences = 0;
  std::uint32_t steps = 0;
  std::uint32_t slice = 0;
  double active = 0.5;
  std::optional<std::uint32_t> gpu_blocks;  ///< Nothing: a quarter of what all sequences need.
  std::optional<std::uint64_t> host_memory;
  std::uint64_t seed = 0;
  std::chrono::milliseconds patience{30'000};
  bool check = true;
  bool json = false;
};

/// The same with its sizes decided.
struct LongctxSizes {
  std::uint32_t sequence_blocks = 0;  ///< Of one sequence at its longest.
  std::uint64_t all_blocks = 0;       ///< Of all of them: what the large arena has.
  std::uint32_t gpu_blocks = 0;
  std::uint32_t active_blocks = 0;  ///< Of those that compute at a time.
  std::uint64_t block_bytes = 0;    ///< Of one block of every group, all ranks.
  /// Of the arena on which what to compare with is computed: all_blocks, when the device holds so
  /// many; else what holds one sequence at least, a few of them at a time; 0: it never does.
  std::uint32_t reference_blocks = 0;
  std::uint64_t host_needed = 0;  ///< Bytes of host memory.
  std::uint64_t host_bytes = 0;

  [[nodiscard]] double oversubscription() const noexcept {
    return gpu_blocks == 0 ? 0 : static_cast<double>(all_blocks) / gpu_blocks;
  }
  [[nodiscard]] bool has_large_arena() const noexcept { return reference_blocks == all_blocks; }
  /// One sequence has more blocks than the device.
  [[nodiscard]] bool in_windows() const noexcept { return sequence_blocks > gpu_blocks; }
};

/// kInvalidArgument with both numbers and the remedy for what does not fit. host_available,
/// device_free: 0 where nobody knows.
[[nodiscard]] ipc::Result<LongctxSizes> decide_sizes(const LongctxConfig& config,
                                                     std::uint64_t host_available,
                                                     std::uint64_t device_free);

/// Runs it on processes of its own and tells what it came to. Returns the exit code.
int run_longctx(const LongctxConfig& config);

}  // namespace kvferry::cli
