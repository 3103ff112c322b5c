// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/eviction_policy.hpp"
#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "rank_options.hpp"
#include "replay/engine.hpp"
#include "replay/trace.hpp"
#include "run_options.hpp"
#include "tier_options.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {

/// A replay, fully decided.
struct ReplayConfig {
  std::string runtime_base;  ///< Empty: the default.
  std::string instance = "replay";
  std::string geometry_name;
  ipc::Geometry geometry;
  DeviceChoice devices;
  ArenaChoice arena;
  worker::ArenaMemory arena_memory = worker::ArenaMemory::kKvferry;
  std::optional<std::uint64_t> host_memory;
  std::string eviction_policy{cache_manager::kDefaultEvictionPolicy};
  std::vector<std::string> namespace_quotas;  ///< As of --namespace-quota.
  std::optional<std::uint32_t> gpu_blocks;
  std::string workload_text;      ///< "conversation, seed 0" or the trace's path.
  std::string report_file;        ///< Empty: none.
  std::string log_dir;            ///< Where the processes' logs stay; empty: they go at the end.
  std::uint64_t clear_every = 0;  ///< Requests; 0: never.
  double speed = 0;
  /// When nothing goes on, or offload is away although nobody died.
  std::chrono::milliseconds stall_timeout{60'000};
  std::uint32_t decode_steps = 1;
  std::uint32_t in_flight = 16;
  ipc::LogLevel log_level = ipc::LogLevel::kInfo;  ///< Of the processes.
  cache_manager::CopyStrategy strategy = cache_manager::CopyStrategy::kAuto;
  ipc::HostPolicy clear_host = ipc::HostPolicy::kKeep;
  VerifyPolicy verify = VerifyPolicy::kSample;
  TierChoice tier;
};

/// Plays the trace through processes of its own and prints the summary. Returns the exit code.
int run_replay(const ReplayConfig& config, const Trace& trace);

}  // namespace kvferry::cli
