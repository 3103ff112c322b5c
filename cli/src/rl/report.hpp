// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/generation_messages.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "rl/record.hpp"
#include "rl/update_kind.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {

/// What an RL loop was asked for.
struct RlSettings {
  std::uint32_t iterations = 0;
  ipc::PauseMode mode = ipc::PauseMode::kRetract;
  UpdateKind update = UpdateKind::kDisk;
  bool empty_cache = true;
  bool clear = false;
  bool release = false;
  std::uint32_t requests_per_iteration = 0;
  std::uint64_t weights_bytes = 0;
  std::uint64_t seed = 0;
  std::string device;
  std::string geometry;
  std::uint32_t ranks = 1;
  std::uint32_t gpu_blocks = 0;
  std::uint64_t host_memory_bytes = 0;
  std::uint64_t lenders = 0;     ///< Processes that lend weights.
  std::uint64_t lent_bytes = 0;  ///< Device memory that all of them take.
};
/// "retract, update from disk, emptied at every continue, 2 ranks of tiny on host".
[[nodiscard]] std::string describe(const RlSettings& settings);

/// What an RL loop ends with: for the terminal, for --report, --plot and the exit code.
struct RlReport {
  RlSettings settings;
  std::vector<IterationRecord> iterations;
  AnswerCounts answers;  ///< Of the whole run.
  std::uint64_t submitted = 0;
  std::uint64_t unanswered = 0;        ///< When the run ended.
  std::uint64_t compared_prompts = 0;  ///< As Verifier.
  std::uint64_t equal_prompts = 0;
  std::vector<ipc::WorkerMemory> workers;  ///< Of each rank, at the end of the last iteration.
  std::uint64_t emptied_continues = 0;     ///< Answered with every rank's memory.
  std::uint64_t quarantined = 0;           ///< Clears that left memory with a peer.
  std::string transport;                   ///< Cycle::transport().
  std::uint64_t restarts = 0;
  std::uint64_t leaked_device_bytes = 0;
  std::uint64_t leaked_host_bytes = 0;
  std::vector<std::string> leftover_names;
  double duration_s = 0;
  bool started = false;             ///< The first request was taken.
  std::vector<std::string> errors;  ///< Why it did not come to its end.
};

/// The most that all ranks' allocators had taken from the driver at any look.
[[nodiscard]] std::uint64_t high_water_bytes(const RlReport& report);
[[nodiscard]] nlohmann::json to_json(const RlReport& report);
/// The table at the end.
[[nodiscard]] std::string summarize(const RlReport& report);
/// Every reason why the run counts as failed, in words; empty when it is good.
[[nodiscard]] std::vector<std::string> failures_of(const RlReport& report);

}  // namespace kvferry::cli
