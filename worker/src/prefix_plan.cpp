// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/prefix_plan.hpp"

#include "kvferry/ipc/index/prefix_rules.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::GroupId;
using ipc::GroupSpec;
using ipc::HitRule;

/// Blocks behind a point of the prefix that the group needs to continue from there.
std::uint32_t depth_needed(const GroupSpec& group, std::uint32_t at) {
  return ipc::blocks_needed({group.rule, group.window_blocks}, at);
}

/// Answers that may change meanwhile, each asked for once: what made a prefix a hit is what is
/// planned.
class SteadySources {
 public:
  SteadySources(std::size_t groups, std::uint32_t length, const SourceOf& source_of)
      : length_(length), source_of_(source_of), known_(groups * length) {}

  BlockSource operator()(GroupId group, std::uint32_t position) {
    std::optional<BlockSource>& known = known_[std::size_t{group.value} * length_ + position];
    if (!known) known = source_of_(group, position);
    return *known;
  }

 private:
  const std::uint32_t length_;
  const SourceOf& source_of_;
  std::vector<std::optional<BlockSource>> known_;
};

bool is_usable(std::span<const GroupSpec> groups, std::uint32_t hit, SteadySources& source_of) {
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    if (groups[g].rule == HitRule::kFull) continue;  // Bounded by the caller.
    for (std::uint32_t i = hit - depth_needed(groups[g], hit); i < hit; ++i) {
      if (source_of(GroupId{g}, i) == BlockSource::kNowhere) return false;
    }
  }
  return true;
}

}  // namespace

PrefixPlan plan_prefix(std::span<const GroupSpec> groups,
                       std::uint32_t length,
                       std::uint32_t whole,
                       const SourceOf& source_of) {
  SteadySources sources(groups.size(), length, source_of);
  PrefixPlan plan;
  std::uint32_t hit = length;
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    if (groups[g].rule != HitRule::kFull) continue;
    std::uint32_t run = 0;
    while (run < hit && sources(GroupId{g}, run) != BlockSource::kNowhere) ++run;
    hit = run;
  }
  while (hit > 0 && !is_usable(groups, hit, sources)) --hit;
  plan.hit_blocks = hit;

  plan.hit_from_host.assign(hit, false);
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    for (std::uint32_t i = hit - depth_needed(groups[g], hit); i < hit; ++i) {
      const BlockSource source = sources(GroupId{g}, i);
      if (source == BlockSource::kHost) plan.hit_from_host[i] = true;
      plan.blocks.push_back(PlannedBlock{GroupId{g}, i, source});
    }
    const std::uint32_t tail = length - depth_needed(groups[g], length);
    const std::uint32_t kept = whole - depth_needed(groups[g], whole);
    for (std::uint32_t i = hit; i < length; ++i) {
      if (i < tail && (i < kept || i >= whole)) continue;
      plan.blocks.push_back(PlannedBlock{GroupId{g}, i, BlockSource::kNowhere});
    }
  }
  plan.host_hits = static_cast<std::uint32_t>(
      std::count(plan.hit_from_host.begin(), plan.hit_from_host.end(), true));
  plan.device_hits = hit - plan.host_hits;
  return plan;
}

std::uint32_t most_blocks_needed(const GroupSpec& group, std::uint32_t length) {
  // The windows behind the hit, behind the last whole block and at the end need not overlap.
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(length, 3ULL * depth_needed(group, length)));
}

}  // namespace kvferry::worker
