// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/load_plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace kvferry::worker {
namespace {

using std::chrono_literals::operator""s;

constexpr ipc::TimePoint kStart{std::chrono::hours(1)};
constexpr std::uint32_t kTokens = 16;

ipc::GroupSpec group(std::string name, ipc::HitRule rule, std::uint64_t bytes) {
  ipc::GroupSpec made;
  made.name = std::move(name);
  made.rule = rule;
  made.window_blocks = 2;
  ipc::RegionSpec region;
  region.block_bytes = bytes;
  made.regions.push_back(region);
  return made;
}

ipc::Geometry geometry_of(ipc::HitRule second) {
  ipc::Geometry geometry;
  geometry.ranks = 2;
  geometry.tokens_per_block = kTokens;
  geometry.groups.push_back(group("main", ipc::HitRule::kFull, 1000));
  geometry.groups.push_back(group("second", second, 500));
  return geometry;
}

/// Loads take one second for so many bytes; computing a block takes one second.
LoadChoice choice_of(std::uint64_t bytes) {
  LoadChoice choice(
      {.mode = RecomputeMode::kAuto, .tokens_per_second = kTokens, .fixed = ipc::Duration::zero()});
  choice.on_loaded(bytes, kStart - 1s, kStart);
  return choice;
}

/// The first `device` blocks are on the device, the next ones up to `host` in host memory.
ChosenPlan choose(const LoadChoice& choice,
                  const ipc::Geometry& geometry,
                  std::uint32_t device,
                  std::uint32_t host,
                  std::uint32_t length) {
  const auto plan_to = [&](std::uint32_t end) {
    return plan_prefix(geometry.groups, length, length, [&](ipc::GroupId, std::uint32_t position) {
      if (position < device) return BlockSource::kDevice;
      return position < end ? BlockSource::kHost : BlockSource::kNowhere;
    });
  };
  return choose_loads(choice, geometry, plan_to(host), plan_to(device), length, length, kTokens, 0,
                      kStart);
}

std::size_t loads_of(const PrefixPlan& plan) {
  return static_cast<std::size_t>(
      std::count_if(plan.blocks.begin(), plan.blocks.end(),
                    [](const PlannedBlock& block) { return block.source == BlockSource::kHost; }));
}

TEST(LoadPlanTest, ABlocksBytesAreThoseOfAllGroupsAndRanks) {
  const ipc::Geometry geometry = geometry_of(ipc::HitRule::kFull);
  EXPECT_EQ(link_bytes(geometry, ipc::GroupId{0}), 2000U);
  EXPECT_EQ(link_bytes(geometry, ipc::GroupId{1}), 1000U);
  // 3000 bytes a place, which a second of compute buys or does not.
  EXPECT_EQ(choose(choice_of(3100), geometry, 1, 5, 8).plan.hit_blocks, 5U);
  EXPECT_EQ(choose(choice_of(2900), geometry, 1, 5, 8).plan.hit_blocks, 1U);
}

TEST(LoadPlanTest, WithoutHostBlocksThereIsNothingToChoose) {
  const ipc::Geometry geometry = geometry_of(ipc::HitRule::kFull);
  const ChosenPlan chosen = choose(choice_of(1), geometry, 3, 3, 8);
  EXPECT_EQ(chosen.plan.hit_blocks, 3U);
  EXPECT_EQ(chosen.decision.length, 0U);
}

TEST(LoadPlanTest, ARefusedPrefixIsComputedFromTheDevicesHitOn) {
  const ipc::Geometry geometry = geometry_of(ipc::HitRule::kFull);
  const ChosenPlan chosen = choose(choice_of(1), geometry, 2, 6, 8);
  EXPECT_EQ(chosen.plan.hit_blocks, 2U);
  EXPECT_EQ(chosen.plan.device_hits, 2U);
  EXPECT_EQ(loads_of(chosen.plan), 0U);
  EXPECT_EQ(chosen.plan.blocks.size(), 2U * 8U);
  EXPECT_EQ(chosen.decision.used, 2U);
  EXPECT_EQ(chosen.decision.length, 6U);
}

TEST(LoadPlanTest, AWindowIsLoadedAsAWholeOrNot) {
  const ipc::Geometry geometry = geometry_of(ipc::HitRule::kSlidingWindow);
  // 4 places of 2000 bytes and a window of 2 of 1000: 10,000 bytes against 4 seconds.
  const ChosenPlan worth = choose(choice_of(2600), geometry, 2, 6, 8);
  EXPECT_EQ(worth.plan.hit_blocks, 6U);
  EXPECT_EQ(loads_of(worth.plan), 6U);
  const ChosenPlan not_worth = choose(choice_of(2400), geometry, 2, 6, 8);
  EXPECT_EQ(not_worth.plan.hit_blocks, 2U);
  EXPECT_EQ(loads_of(not_worth.plan), 0U);
}

TEST(LoadPlanTest, APrefixIsCutWhereLoadingEndsToBeFaster) {
  // The second group has the first two places on the device: they take 2000 bytes, later ones 3000.
  const ipc::Geometry geometry = geometry_of(ipc::HitRule::kFull);
  const auto with_host = [](ipc::GroupId group_id, std::uint32_t position) {
    if (group_id.value == 1 && position < 2) return BlockSource::kDevice;
    return position < 5 ? BlockSource::kHost : BlockSource::kNowhere;
  };
  const auto without = [](ipc::GroupId group_id, std::uint32_t position) {
    return group_id.value == 1 && position < 2 ? BlockSource::kDevice : BlockSource::kNowhere;
  };
  const LoadChoice choice = choice_of(2500);
  const ChosenPlan chosen =
      choose_loads(choice, geometry, plan_prefix(geometry.groups, 8, 8, with_host),
                   plan_prefix(geometry.groups, 8, 8, without), 8, 8, kTokens, 0, kStart);
  EXPECT_EQ(chosen.decision.used, 2U);
  EXPECT_EQ(chosen.plan.hit_blocks, 2U);
  EXPECT_EQ(loads_of(chosen.plan), 2U);
  EXPECT_EQ(chosen.plan.blocks.size(), 2U * 8U);
}

}  // namespace
}  // namespace kvferry::worker
