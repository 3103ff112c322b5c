// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/children.hpp"

#include "command.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>

namespace kvferry::cli {
namespace {

std::vector<std::string> common_arguments(const ReplayConfig& config,
                                          const std::filesystem::path& runtime_dir,
                                          std::string command) {
  return {std::move(command), "--instance=" + config.instance,
          "--runtime-dir=" + runtime_dir.string(),
          fmt::format("--log-level={}", level_name(config.log_level))};
}

/// Those that a rank's worker and mover have to agree on.
std::vector<std::string> rank_arguments(const ReplayConfig& config,
                                        const ReplayPlan& plan,
                                        std::uint32_t rank) {
  std::vector<std::string> arguments;
  const auto add = [&arguments](std::string_view name, const auto& value) {
    arguments.push_back(fmt::format("--{}={}", name, value));
  };
  add("engine", kReplayEngine);
  add("rank", rank);
  add("ranks", config.geometry.ranks);
  add("geometry", config.geometry_name);
  add("gpu-blocks", plan.sizing.gpu_blocks);
  add("device", plan.devices[rank].to_string());
  add("cache-owner", ipc::to_string(config.arena.cache_owner));
  add("handles", ipc::to_string(config.arena.handles));
  add("arena", ipc::to_string(config.arena.order));
  add("staging-slots", plan.arena.staging_slots);
  if (plan.arena.staging_slots > 0) add("staging-slot-bytes", plan.arena.staging_slot_bytes);
  return arguments;
}

}  // namespace

std::vector<ChildSpec> replay_children(const ReplayConfig& config,
                                       const ReplayPlan& plan,
                                       const std::filesystem::path& runtime_dir) {
  std::vector<ChildSpec> children;
  ChildSpec manager;
  manager.name = "manager";
  manager.arguments = common_arguments(config, runtime_dir, "manager");
  manager.arguments.push_back(fmt::format("--host-memory={}", plan.sizing.host_bytes));
  manager.ends_last = true;
  children.push_back(std::move(manager));
  for (std::uint32_t r = 0; r < config.geometry.ranks; ++r) {
    const std::vector<std::string> shared = rank_arguments(config, plan, r);
    ChildSpec worker;
    worker.name = fmt::format("worker/{}", r);
    worker.arguments = common_arguments(config, runtime_dir, "worker");
    worker.arguments.insert(worker.arguments.end(), shared.begin(), shared.end());
    worker.arguments.push_back(
        fmt::format("--arena-memory={}", kvferry::worker::to_string(config.arena_memory)));
    children.push_back(std::move(worker));
    ChildSpec mover;
    mover.name = fmt::format("mover/{}", r);
    mover.arguments = common_arguments(config, runtime_dir, "mover");
    mover.arguments.insert(mover.arguments.end(), shared.begin(), shared.end());
    mover.arguments.push_back(
        fmt::format("--copy-strategy={}", cache_manager::to_string(config.strategy)));
    children.push_back(std::move(mover));
  }
  return children;
}

}  // namespace kvferry::cli
