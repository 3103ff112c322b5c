// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/index/prefix_rules.hpp"

#include <algorithm>

namespace kvferry::ipc {

std::vector<GroupRule> rules_of(const Geometry& geometry) {
  std::vector<GroupRule> rules;
  rules.reserve(geometry.groups.size());
  for (const GroupSpec& group : geometry.groups) rules.push_back({group.rule, group.window_blocks});
  return rules;
}

std::vector<GroupRule> rules_in_units(std::vector<GroupRule> rules, std::uint32_t unit_blocks) {
  if (unit_blocks == 1) return rules;
  for (GroupRule& rule : rules) {
    if (rule.rule != HitRule::kSlidingWindow) continue;
    // In the worst case the last unit has one block, and the others of the window are before it.
    const std::uint64_t before = std::max(rule.window_blocks, 1U) - 1;
    rule.window_blocks = static_cast<std::uint32_t>(1 + (before + unit_blocks - 1) / unit_blocks);
  }
  return rules;
}

std::uint32_t blocks_needed(const GroupRule& rule, std::uint32_t n) noexcept {
  switch (rule.rule) {
    case HitRule::kFull: return n;
    case HitRule::kSlidingWindow: return std::min(n, std::max(rule.window_blocks, 1U));
    case HitRule::kLastState: return std::min(n, 1U);
  }
  return n;
}

}  // namespace kvferry::ipc
