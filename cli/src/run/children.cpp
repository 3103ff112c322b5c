// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run/children.hpp"

#include "command.hpp"
#include "options.hpp"

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace kvferry::cli {
namespace {

std::vector<std::string> common_arguments(const InstancePlan& plan,
                                          const std::filesystem::path& runtime_dir,
                                          std::string command) {
  return {std::move(command), "--instance=" + plan.instance,
          "--runtime-dir=" + runtime_dir.string(),
          fmt::format("--log-level={}", level_name(plan.log_level))};
}

/// Those that a rank's worker and mover have to agree on.
std::vector<std::string> rank_arguments(const InstancePlan& plan,
                                        const EnginePlan& engine,
                                        std::size_t rank) {
  std::vector<std::string> arguments;
  const auto add = [&arguments](std::string_view name, const auto& value) {
    arguments.push_back(fmt::format("--{}={}", name, value));
  };
  add("engine", engine.name);
  add("rank", rank);
  add("ranks", engine.devices.size());
  add("geometry", plan.geometry_name);
  add("gpu-blocks", plan.gpu_blocks);
  add("device", engine.devices[rank].to_string());
  add("cache-owner", ipc::to_string(plan.choice.cache_owner));
  add("handles", ipc::to_string(plan.choice.handles));
  add("arena", ipc::to_string(plan.choice.order));
  add("staging-slots", plan.arena.staging_slots);
  if (plan.arena.staging_slots > 0) add("staging-slot-bytes", plan.arena.staging_slot_bytes);
  return arguments;
}

void add_rank_children(const InstancePlan& plan,
                       const EnginePlan& engine,
                       const std::string& prefix,
                       const std::filesystem::path& runtime_dir,
                       std::vector<ChildSpec>& children) {
  for (std::size_t r = 0; r < engine.devices.size(); ++r) {
    const std::vector<std::string> shared = rank_arguments(plan, engine, r);
    ChildSpec worker;
    worker.name = fmt::format("{}worker/{}", prefix, r);
    worker.arguments = common_arguments(plan, runtime_dir, "worker");
    worker.arguments.insert(worker.arguments.end(), shared.begin(), shared.end());
    worker.arguments.push_back(
        fmt::format("--arena-memory={}", kvferry::worker::to_string(plan.arena_memory)));
    for (const std::string& argument : plan.worker_arguments) {
      worker.arguments.push_back(for_rank(argument, r));
    }
    for (const std::string& variable : plan.worker_environment) {
      worker.environment.push_back(for_rank(variable, r));
    }
    children.push_back(std::move(worker));
    ChildSpec mover;
    mover.name = fmt::format("{}mover/{}", prefix, r);
    mover.arguments = common_arguments(plan, runtime_dir, "mover");
    mover.arguments.insert(mover.arguments.end(), shared.begin(), shared.end());
    mover.arguments.push_back(
        fmt::format("--copy-strategy={}", cache_manager::to_string(plan.strategy)));
    children.push_back(std::move(mover));
  }
}

ChildSpec lender_child(const InstancePlan& plan,
                       const LenderPlan& lender,
                       const std::filesystem::path& runtime_dir) {
  ChildSpec child;
  child.name = "lender/" + lender.name;
  child.arguments = common_arguments(plan, runtime_dir, "export-weights");
  child.arguments.push_back("--name=" + lender.name);
  child.arguments.push_back("--file=" + lender.file.string());
  child.arguments.push_back("--device=" + lender.device.to_string());
  child.arguments.push_back(fmt::format("--handles={}", ipc::to_string(plan.choice.handles)));
  return child;
}

}  // namespace

std::string for_rank(std::string text, std::size_t rank) {
  constexpr std::string_view kMark = "{rank}";
  for (auto mark = text.find(kMark); mark != std::string::npos; mark = text.find(kMark)) {
    text.replace(mark, kMark.size(), std::to_string(rank));
  }
  return text;
}

std::vector<ChildSpec> instance_children(const InstancePlan& plan,
                                         const std::filesystem::path& runtime_dir) {
  std::vector<ChildSpec> children;
  ChildSpec manager;
  manager.name = "manager";
  manager.arguments = common_arguments(plan, runtime_dir, "manager");
  manager.arguments.push_back(fmt::format("--host-memory={}", plan.host_bytes));
  manager.arguments.push_back(fmt::format("--eviction-policy={}", plan.eviction_policy));
  for (const std::string& quota : plan.namespace_quotas) {
    manager.arguments.push_back("--namespace-quota=" + quota);
  }
  manager.ends_last = true;
  children.push_back(std::move(manager));
  add_rank_children(plan, {plan.engine, plan.devices}, "", runtime_dir, children);
  for (const EnginePlan& engine : plan.more_engines) {
    add_rank_children(plan, engine, engine.name + "/", runtime_dir, children);
  }
  for (const LenderPlan& lender : plan.lenders) {
    children.push_back(lender_child(plan, lender, runtime_dir));
  }
  return children;
}

ChildSpec copier_child(const InstancePlan& plan,
                       const std::filesystem::path& runtime_dir,
                       const std::filesystem::path& socket) {
  ChildSpec child;
  child.name = "copier";
  child.arguments = common_arguments(plan, runtime_dir, "bench-copier");
  const std::vector<std::string> shared = rank_arguments(plan, {plan.engine, plan.devices}, 0);
  child.arguments.insert(child.arguments.end(), shared.begin(), shared.end());
  child.arguments.push_back("--socket=" + socket.string());
  for (const std::string& argument : plan.worker_arguments) {
    child.arguments.push_back(for_rank(argument, 0));
  }
  return child;
}

}  // namespace kvferry::cli
