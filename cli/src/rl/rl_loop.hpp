// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "rank_options.hpp"
#include "rl/update_kind.hpp"
#include "run_options.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {

/// A loop of rollouts and weight updates, fully decided.
struct RlConfig {
  std::string runtime_base;  ///< Empty: the default.
  std::string instance = "rl";
  std::string geometry_name;
  ipc::Geometry geometry;
  DeviceChoice devices;
  ArenaChoice arena;
  worker::ArenaMemory arena_memory = worker::ArenaMemory::kKvferry;
  std::optional<std::uint64_t> host_memory;
  std::optional<std::uint32_t> gpu_blocks;
  std::uint32_t iterations = 200;
  std::uint32_t requests_per_iteration = 16;
  ipc::PauseMode mode = ipc::PauseMode::kRetract;
  UpdateKind update = UpdateKind::kDisk;
  bool empty_cache = true;
  bool clear = false;    ///< Also clears and re-inits in every iteration.
  bool release = false;  ///< Also releases and resumes all device memory in every iteration.
  std::uint64_t weights_bytes = 64ULL << 20;
  bool weights_broadcast = true;                ///< WorkerConfig::weights_broadcast.
  std::vector<std::string> worker_environment;  ///< InstancePlan::worker_environment.
  std::uint64_t seed = 0;
  std::string report_file;  ///< Empty: none.
  std::string plot_file;    ///< Empty: none.
  std::string log_dir;      ///< Where the processes' logs stay; empty: they go at the end.
  /// When nothing goes on: no request ends, no command is answered.
  std::chrono::milliseconds stall_timeout{60'000};
  ipc::LogLevel log_level = ipc::LogLevel::kInfo;  ///< Of the processes.
};

/// Runs the loop through processes of its own and prints what came of it. Returns the exit code.
int run_rl_loop(const RlConfig& config);

}  // namespace kvferry::cli
