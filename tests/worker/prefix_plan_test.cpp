// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/prefix_plan.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

namespace kvferry::worker {
namespace {

using ipc::GroupId;
using ipc::GroupSpec;
using ipc::HitRule;

GroupSpec group(HitRule rule, std::uint32_t window = 0) {
  GroupSpec spec;
  spec.rule = rule;
  spec.window_blocks = window;
  return spec;
}

/// One text per group, one letter per position: d device, h host, . nowhere.
SourceOf sources(std::vector<std::string> texts) {
  return [texts = std::move(texts)](GroupId g, std::uint32_t i) {
    const char c = texts[g.value][i];
    return c == 'd' ? BlockSource::kDevice : c == 'h' ? BlockSource::kHost : BlockSource::kNowhere;
  };
}

/// The plan's blocks of one group as a text: d, h, c (to compute), - (not needed).
std::string needs(const PrefixPlan& plan, std::uint32_t g, std::uint32_t length) {
  std::string text(length, '-');
  for (const PlannedBlock& block : plan.blocks) {
    if (block.group.value != g) continue;
    text[block.position] = block.source == BlockSource::kDevice ? 'd'
                           : block.source == BlockSource::kHost ? 'h'
                                                                : 'c';
  }
  return text;
}

TEST(PrefixPlanTest, FullAttentionHitsUpToTheFirstMiss) {
  const std::vector groups = {group(HitRule::kFull)};
  const PrefixPlan plan = plan_prefix(groups, 6, 6, sources({"ddh.hd"}));
  EXPECT_EQ(plan.hit_blocks, 3U);
  EXPECT_EQ(plan.device_hits, 2U);
  EXPECT_EQ(plan.host_hits, 1U);
  EXPECT_EQ(needs(plan, 0, 6), "ddhccc");
}

// What it asks may change between two looks: a block that was a hit must not be planned as nowhere.
TEST(PrefixPlanTest, EachBlockIsAskedForOnce) {
  const std::vector groups = {group(HitRule::kFull), group(HitRule::kSlidingWindow, 2),
                              group(HitRule::kLastState)};
  std::set<std::pair<std::uint32_t, std::uint32_t>> asked;
  const PrefixPlan plan = plan_prefix(groups, 6, 6, [&](GroupId g, std::uint32_t i) {
    EXPECT_TRUE(asked.emplace(g.value, i).second) << "group " << g.value << ", block " << i;
    return BlockSource::kHost;
  });
  EXPECT_EQ(plan.hit_blocks, 6U);
  for (const PlannedBlock& block : plan.blocks) EXPECT_EQ(block.source, BlockSource::kHost);
}

TEST(PrefixPlanTest, NothingIsAHitWithoutTheFirstBlock) {
  const std::vector groups = {group(HitRule::kFull)};
  const PrefixPlan plan = plan_prefix(groups, 3, 3, sources({".dd"}));
  EXPECT_EQ(plan.hit_blocks, 0U);
  EXPECT_EQ(needs(plan, 0, 3), "ccc");
}

TEST(PrefixPlanTest, ASlidingWindowNeedsOnlyItsLastBlocks) {
  const std::vector groups = {group(HitRule::kFull), group(HitRule::kSlidingWindow, 2)};
  const PrefixPlan plan = plan_prefix(groups, 6, 6, sources({"dddd..", "..hd.."}));
  EXPECT_EQ(plan.hit_blocks, 4U);
  EXPECT_EQ(plan.device_hits, 3U);
  EXPECT_EQ(plan.host_hits, 1U);
  EXPECT_EQ(needs(plan, 0, 6), "ddddcc");
  EXPECT_EQ(needs(plan, 1, 6), "--hdcc");
}

TEST(PrefixPlanTest, AWindowWithAGapShortensTheHit) {
  const std::vector groups = {group(HitRule::kFull), group(HitRule::kSlidingWindow, 2)};
  const PrefixPlan plan = plan_prefix(groups, 5, 5, sources({"ddddd", "dd.d."}));
  EXPECT_EQ(plan.hit_blocks, 2U);
  EXPECT_EQ(needs(plan, 0, 5), "ddccc");
  EXPECT_EQ(needs(plan, 1, 5), "dd-cc");
}

TEST(PrefixPlanTest, AStateGroupNeedsTheLastBlockAlone) {
  const std::vector groups = {group(HitRule::kFull), group(HitRule::kLastState)};
  const PrefixPlan plan = plan_prefix(groups, 5, 5, sources({"ddddd", "..h.."}));
  EXPECT_EQ(plan.hit_blocks, 3U);
  EXPECT_EQ(needs(plan, 1, 5), "--h-c");
}

/// The next turn shares the whole blocks and not the last one, which it fills with its own tokens.
TEST(PrefixPlanTest, WhatTheNextTurnContinuesFromIsKeptBehindTheLastWholeBlock) {
  const std::vector groups = {group(HitRule::kFull), group(HitRule::kSlidingWindow, 2),
                              group(HitRule::kLastState)};
  const PrefixPlan first = plan_prefix(groups, 6, 5, sources({"......", "......", "......"}));
  EXPECT_EQ(needs(first, 0, 6), "cccccc");
  EXPECT_EQ(needs(first, 1, 6), "---ccc");
  EXPECT_EQ(needs(first, 2, 6), "----cc");
  const PrefixPlan next = plan_prefix(groups, 8, 7, sources({"ddddd...", "...dd...", "....d..."}));
  EXPECT_EQ(next.hit_blocks, 5U);
  EXPECT_EQ(needs(next, 2, 8), "----d-cc");
}

TEST(PrefixPlanTest, AWholeHitComputesNothing) {
  const std::vector groups = {group(HitRule::kFull), group(HitRule::kSlidingWindow, 3),
                              group(HitRule::kLastState)};
  const PrefixPlan plan = plan_prefix(groups, 4, 4, sources({"hhhh", ".hhh", "...h"}));
  EXPECT_EQ(plan.hit_blocks, 4U);
  EXPECT_EQ(plan.host_hits, 4U);
  EXPECT_EQ(needs(plan, 0, 4), "hhhh");
  EXPECT_EQ(needs(plan, 1, 4), "-hhh");
  EXPECT_EQ(needs(plan, 2, 4), "---h");
}

/// Against the rule written out, over all presence patterns of a small request.
TEST(PrefixPlanTest, FindsTheLongestUsablePrefixOverAllPatterns) {
  const std::vector groups = {group(HitRule::kFull), group(HitRule::kSlidingWindow, 2)};
  constexpr std::uint32_t kLength = 5;
  for (std::uint32_t pattern = 0; pattern < (1U << (2 * kLength)); ++pattern) {
    const auto there = [&](std::uint32_t g, std::uint32_t i) {
      return ((pattern >> (g * kLength + i)) & 1U) != 0;
    };
    std::uint32_t expected = 0;
    for (std::uint32_t hit = 1; hit <= kLength; ++hit) {
      bool usable = true;
      for (std::uint32_t i = 0; i < hit; ++i) usable = usable && there(0, i);
      for (std::uint32_t i = hit < 2 ? 0 : hit - 2; i < hit; ++i) usable = usable && there(1, i);
      if (usable) expected = hit;
    }
    const PrefixPlan plan = plan_prefix(groups, kLength, kLength, [&](GroupId g, std::uint32_t i) {
      return there(g.value, i) ? BlockSource::kHost : BlockSource::kNowhere;
    });
    ASSERT_EQ(plan.hit_blocks, expected) << "pattern " << pattern;
    std::uint32_t per_group[2] = {0, 0};
    for (const PlannedBlock& block : plan.blocks) ++per_group[block.group.value];
    ASSERT_LE(per_group[0], most_blocks_needed(groups[0], kLength));
    ASSERT_LE(per_group[1], most_blocks_needed(groups[1], kLength));
  }
}

}  // namespace
}  // namespace kvferry::worker
