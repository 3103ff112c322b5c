// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/eviction_policy.hpp"
#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/worker/worker.hpp"
#include "rank_options.hpp"
#include "run/supervisor.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace kvferry::cli {

/// A process that lends a file's weights in device memory.
struct LenderPlan {
  std::string name;  ///< What an update calls it.
  std::filesystem::path file;
  ipc::DeviceSpec device;
};

/// An engine beside the instance's own: workers and movers like those, of as many ranks.
struct EnginePlan {
  std::string name;
  std::vector<ipc::DeviceSpec> devices;  ///< Of each rank.
};

/// A whole instance with one engine, decided before its first process: what all of them are started
/// with.
struct InstancePlan {
  std::string instance;
  std::string engine;  ///< The name under which workers, movers and engine find each other.
  ipc::LogLevel log_level = ipc::LogLevel::kInfo;
  std::string geometry_name;
  std::uint32_t gpu_blocks = 0;
  std::uint64_t host_bytes = 0;
  std::string eviction_policy{cache_manager::kDefaultEvictionPolicy};
  std::vector<std::string> namespace_quotas;  ///< As of --namespace-quota.
  ArenaChoice choice;
  ipc::ArenaOptions arena;
  worker::ArenaMemory arena_memory = worker::ArenaMemory::kKvferry;
  cache_manager::CopyStrategy strategy = cache_manager::CopyStrategy::kAuto;
  std::vector<ipc::DeviceSpec> devices;  ///< Of each rank.
  /// For every worker beyond all that, and NAME=VALUE; {rank} stands for its number.
  std::vector<std::string> worker_arguments;
  std::vector<std::string> worker_environment;
  std::vector<EnginePlan> more_engines;
  std::vector<LenderPlan> lenders;  ///< Beside the engines.
};

/// The text with the number in place of each {rank}.
[[nodiscard]] std::string for_rank(std::string text, std::size_t rank);

/// The instance's processes with their command lines, in the order in which they are started: the
/// manager, then a worker and a mover of each rank, then those of further engines
/// (ENGINE/worker/0), then those that lend.
[[nodiscard]] std::vector<ChildSpec> instance_children(const InstancePlan& plan,
                                                       const std::filesystem::path& runtime_dir);

/// A worker of the plan's first rank that copies by itself, for an engine that listens there.
[[nodiscard]] ChildSpec copier_child(const InstancePlan& plan,
                                     const std::filesystem::path& runtime_dir,
                                     const std::filesystem::path& socket);

}  // namespace kvferry::cli
