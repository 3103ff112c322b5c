// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/index/prefix_rules.hpp"

#include <gtest/gtest.h>

namespace kvferry::ipc {
namespace {

TEST(PrefixRulesTest, InUnitsAWindowHasWhatItNeedsWhereverItEnds) {
  for (std::uint32_t window = 0; window <= 40; ++window) {
    for (std::uint32_t unit = 1; unit <= 9; ++unit) {
      const std::vector<GroupRule> rules =
          rules_in_units({{HitRule::kSlidingWindow, window}}, unit);
      for (std::uint32_t end = 1; end <= 60; ++end) {
        const std::uint32_t blocks = blocks_needed({HitRule::kSlidingWindow, window}, end);
        const std::uint32_t units = (end + unit - 1) / unit;
        const std::uint32_t needed = blocks_needed(rules.front(), units);
        const std::uint32_t first = (units - needed) * unit;  // block that is held for sure
        EXPECT_LE(first, end - blocks) << "window " << window << " unit " << unit << " end " << end;
        EXPECT_LE(needed * unit, blocks + 2 * unit) << "not much more";
      }
    }
  }
}

TEST(PrefixRulesTest, InUnitsOtherRulesAreTheSame) {
  const std::vector<GroupRule> rules{{HitRule::kFull, 0}, {HitRule::kLastState, 0}};
  EXPECT_EQ(rules_in_units(rules, 7), rules);
}

}  // namespace
}  // namespace kvferry::ipc
