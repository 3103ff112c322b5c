// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/rank/component_user.hpp"
#include "kvferry/ipc/rank/rank_config.hpp"
#include "kvferry/worker/compute_load.hpp"
#include "kvferry/worker/copy_budget.hpp"
#include "kvferry/worker/tier_options.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace kvferry::worker {

/// Who allocates the arena of a worker that owns the cache: kvferry, in the layout that it plans,
/// or the engine, which registers the regions of its own tensors (registration.hpp).
enum class ArenaMemory : std::uint8_t { kKvferry = 1, kEngine = 2 };
[[nodiscard]] std::string_view to_string(ArenaMemory memory) noexcept;

struct WorkerConfig {
  ipc::RankConfig rank;
  ArenaMemory arena_memory = ArenaMemory::kKvferry;
  /// A safetensors file, of which each rank loads its part; empty for a worker without weights.
  std::string weights;
  /// What they are known by: random for each load unless the caller knows better.
  ipc::Digest weights_id = ipc::Digest::random();
  /// What becomes of their tensors once they are packed for the model: they stay on the device, or
  /// are in host memory between two loads, as a whole or layer by layer.
  ipc::ComponentStrategy weights_strategy = ipc::ComponentStrategy::kResident;
  /// Whether an update from rank 0's file may come by a broadcast between devices, or in messages
  /// alone.
  bool weights_broadcast = true;
  /// Whether this engine of reference workers takes requests (GenerationChannel): rank 0 runs its
  /// scheduler, a client of the manager. Engines with a scheduler of their own leave it.
  bool serve = false;
  /// Without a step for so long, what the allocator caches goes back to the driver, once until the
  /// next step; zero for never.
  std::chrono::milliseconds idle_trim{0};
  /// What copies may take of the device's multiprocessors.
  CopyBudget copies{};
  /// What the device computes all the time, for measurements.
  std::optional<ComputeLoadConfig> load = std::nullopt;
  /// With serve: what its scheduler does with host memory.
  TierOptions tier{};
};

/// Runs the reference worker of one rank until SIGTERM, SIGINT or SIGHUP: arena, staging agent,
/// runner. Throws Exception when it cannot be set up.
void run_worker(const WorkerConfig& config);

}  // namespace kvferry::worker
