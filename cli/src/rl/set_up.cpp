// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/set_up.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "must.hpp"
#include "replay/sizing.hpp"
#include "rl/lenders.hpp"
#include "table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

/// The name under which the loop's workers and movers find each other.
constexpr const char* kRlEngine = "rl";
/// Sequences of the longest kind that a device holds at least, when nobody says how many blocks.
constexpr std::uint32_t kLeastSequences = 4;

/// Blocks of host memory for everything under all versions, of the device for half of the requests:
/// others wait, and their prefixes come and go.
TraceFacts facts_of(const RlConfig& config, const PromptSet& prompts) {
  TraceFacts facts;
  facts.distinct_blocks = prompts.total_blocks() * kWeightsVersions;
  facts.block_references = facts.distinct_blocks;
  facts.longest_request_blocks = prompts.longest_blocks();
  if (!config.gpu_blocks) {
    facts.longest_request_blocks *= std::max(kLeastSequences, config.requests_per_iteration / 2);
  }
  return facts;
}

RlSettings settings_of(const RlConfig& config, const InstancePlan& plan) {
  RlSettings settings;
  settings.iterations = config.iterations;
  settings.mode = config.mode;
  settings.update = config.update;
  settings.empty_cache = config.empty_cache;
  settings.clear = config.clear;
  settings.release = config.release;
  settings.requests_per_iteration = config.requests_per_iteration;
  settings.weights_bytes = config.weights_bytes;
  settings.seed = config.seed;
  settings.device = describe_devices(plan.devices);
  settings.geometry = config.geometry_name;
  settings.ranks = config.geometry.ranks;
  settings.gpu_blocks = plan.gpu_blocks;
  settings.host_memory_bytes = plan.host_bytes;
  settings.lenders = plan.lenders.size();
  settings.lent_bytes = plan.lenders.size() * lent_bytes(config.weights_bytes, settings.ranks);
  return settings;
}

/// What lenders leave of memory that the others could take. 0 stays: nobody knows how much it is.
std::uint64_t left_by_lenders(std::uint64_t free_bytes,
                              std::uint64_t lent,
                              std::string_view place) {
  if (free_bytes == 0 || lent < free_bytes) return free_bytes - std::min(lent, free_bytes);
  throw ipc::Exception(KVFERRY_ERROR(
      kInvalidArgument,
      "the processes that lend weights take {} of {}, where {} are free: give less --weights-size, "
      "or another --update",
      ipc::format_size(lent), place, ipc::format_size(free_bytes)));
}

std::string processes_of(const InstancePlan& plan) {
  std::string text = fmt::format("1 manager, {0} mover{1}, {0} worker{1}", plan.devices.size(),
                                 plan.devices.size() == 1 ? "" : "s");
  if (!plan.lenders.empty()) text += fmt::format(", {} lenders", plan.lenders.size());
  return text;
}

/// "v0, v1, v2; 64.0 MiB of device memory each".
std::string lenders_of(const RlConfig& config, const RlSetUp& set_up) {
  std::vector<std::string> sources;
  for (const WeightsVersion& version : set_up.weights) sources.push_back(version.lender);
  return fmt::format("{}; {} of device memory each", fmt::join(sources, ", "),
                     ipc::format_size(lent_bytes(config.weights_bytes, config.geometry.ranks)));
}

}  // namespace

RlSetUp set_up_rl_loop(const RlConfig& config, const RunDir& dir) {
  const ipc::Geometry& geometry = config.geometry;
  const bool cuda = config.devices.kind == ipc::DeviceKind::kCuda;
  PromptSet prompts(config.seed, config.requests_per_iteration, geometry.tokens_per_block);
  InstancePlan plan;
  plan.instance = config.instance;
  plan.engine = kRlEngine;
  plan.log_level = config.log_level;
  plan.geometry_name = config.geometry_name;
  plan.choice = config.arena;
  plan.arena_memory = config.arena_memory;
  plan.devices = cuda_devices(config.devices, geometry.ranks);

  SizingLimits limits;
  const std::uint64_t lent =
      config.update == UpdateKind::kIpc ? lent_bytes(config.weights_bytes, geometry.ranks) : 0;
  limits.host_available = left_by_lenders(
      available_host_bytes(), cuda ? 0 : lent * kWeightsVersions * geometry.ranks, "host memory");
  limits.host_bytes = limits.host_available / 2;
  limits.devices_in_host_memory = !cuda;
  std::optional<DeviceProbe> probe;
  if (cuda) {
    probe.emplace(plan.devices);
    // Contexts, staging, weights and scratch of two processes take their part.
    limits.device_bytes = left_by_lenders(probe->smallest_free_bytes(),
                                          lent * lenders_on_fullest(plan.devices), "a device") /
                          2 / config.devices.ranks_on_each(geometry.ranks);
  }
  const Sizing sizing = must(choose_sizes(geometry, facts_of(config, prompts), config.gpu_blocks,
                                          config.host_memory, limits));
  plan.gpu_blocks = sizing.gpu_blocks;
  plan.host_bytes = sizing.host_bytes;
  plan.arena = make_arena_options(config.arena, geometry, plan.gpu_blocks, config.devices.kind);
  if (!cuda) {
    plan.devices = must(host_devices(fmt::format("rl-{}", dir.token()), geometry, plan.arena));
    // A worker's segments: as large as the weights, twice while one is rounded up.
    for (ipc::DeviceSpec& device : plan.devices) {
      device.host_capacity_bytes += 2 * config.weights_bytes + lent * kWeightsVersions;
    }
    probe.emplace(plan.devices);
  }
  auto weights = must(write_weights_versions(dir.path() / "weights", config.weights_bytes,
                                             geometry.ranks, config.seed));
  plan.worker_arguments = {"--weights=" + weights.front().file.string(),
                           "--weights-id=" + weights.front().id.hex(), "--serve"};
  if (!config.weights_broadcast) {
    plan.worker_arguments.emplace_back("--weights-broadcast=messages");
  }
  plan.worker_environment = config.worker_environment;
  if (config.update == UpdateKind::kIpc) plan.lenders = plan_lenders(weights, plan.devices);
  RlSettings settings = settings_of(config, plan);
  return {std::move(prompts), std::move(plan), std::move(weights), std::move(*probe),
          std::move(settings)};
}

std::string rl_heading(const RlConfig& config, const RlSetUp& set_up, const RunDir& dir) {
  const InstancePlan& plan = set_up.plan;
  Table table({{""}, {""}});
  table.add({"iterations", fmt::format("{}: {}", config.iterations, describe(set_up.settings))});
  table.add({"requests",
             fmt::format("{} in each, drawn from {} prompts, seed {}",
                         config.requests_per_iteration, set_up.prompts.all().size(), config.seed)});
  table.add({"weights", fmt::format("{} versions of {}", kWeightsVersions,
                                    ipc::format_size(config.weights_bytes))});
  table.add(
      {"device blocks",
       fmt::format("{} ({} on each rank)", with_separators(plan.gpu_blocks),
                   ipc::format_size(plan.gpu_blocks * device_bytes_per_block(config.geometry)))});
  table.add({"host memory", ipc::format_size(plan.host_bytes)});
  table.add({"processes", processes_of(plan)});
  if (!plan.lenders.empty()) table.add({"lenders", lenders_of(config, set_up)});
  table.add({"look at it", fmt::format("kvferry status --runtime-dir {} --instance {}",
                                       dir.path().string(), config.instance)});
  return "kvferry rl-loop\n" + table.render("  ");
}

}  // namespace kvferry::cli
