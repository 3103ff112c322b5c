// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/load_plan.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace kvferry::worker {
namespace {

/// The same request with only the first `used` blocks of its prefix. @pre every group is full
PrefixPlan cut_plan(const ipc::Geometry& geometry,
                    const PrefixPlan& plan,
                    std::uint32_t used,
                    std::uint32_t length,
                    std::uint32_t whole) {
  std::vector<std::vector<BlockSource>> sources(geometry.groups.size());
  for (auto& group : sources) group.resize(used);
  for (const PlannedBlock& planned : plan.blocks) {
    if (planned.position < used) sources[planned.group.value][planned.position] = planned.source;
  }
  return plan_prefix(
      geometry.groups, length, whole, [&](ipc::GroupId group, std::uint32_t position) {
        return position < used ? sources[group.value][position] : BlockSource::kNowhere;
      });
}

}  // namespace

std::uint64_t link_bytes(const ipc::Geometry& geometry, ipc::GroupId group) {
  return (geometry.replicated_bytes(group) + geometry.sharded_bytes(group)) * geometry.ranks;
}

ChosenPlan choose_loads(const LoadChoice& choice,
                        const ipc::Geometry& geometry,
                        PrefixPlan plan,
                        PrefixPlan on_device,
                        std::uint32_t length,
                        std::uint32_t whole,
                        std::uint32_t tokens_per_block,
                        std::uint64_t ahead_bytes,
                        ipc::TimePoint now) {
  if (plan.hit_blocks <= on_device.hit_blocks) return {std::move(on_device), {}};
  const bool all_full =
      std::all_of(geometry.groups.begin(), geometry.groups.end(),
                  [](const ipc::GroupSpec& group) { return group.rule == ipc::HitRule::kFull; });
  std::vector<std::uint64_t> bytes(plan.hit_blocks);
  for (const PlannedBlock& planned : plan.blocks) {
    if (planned.source != BlockSource::kHost) continue;
    bytes[all_full ? planned.position : on_device.hit_blocks] +=
        link_bytes(geometry, planned.group);
  }
  const LoadChoice::Decision decision = choice.choose(bytes, tokens_per_block, ahead_bytes, now);
  if (decision.used == plan.hit_blocks) return {std::move(plan), decision};
  if (decision.used <= on_device.hit_blocks || !all_full) return {std::move(on_device), decision};
  return {cut_plan(geometry, plan, decision.used, length, whole), decision};
}

}  // namespace kvferry::worker
