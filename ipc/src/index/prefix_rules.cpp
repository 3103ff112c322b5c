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

std::uint32_t blocks_needed(const GroupRule& rule, std::uint32_t n) noexcept {
  switch (rule.rule) {
    case HitRule::kFull: return n;
    case HitRule::kSlidingWindow: return std::min(n, std::max(rule.window_blocks, 1U));
    case HitRule::kLastState: return std::min(n, 1U);
  }
  return n;
}

}  // namespace kvferry::ipc
