// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "step_plan.hpp"

#include "stage_check.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::BlockId;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::RegionSet;
using testing::ElementsAre;
using testing::HasSubstr;

/// A table that nobody launches with: the checks ask only whether there is one.
class EmptyTable final : public ipc::RegionTable {
 public:
  [[nodiscard]] std::span<const kernels::StridedRegion> regions() const noexcept override {
    return {};
  }
};

/// Two groups of 10 and 4 blocks; the second has no replicated region. Slots of 4096 bytes.
MappedArena make_arena() {
  MappedArena arena;
  arena.groups.resize(2);
  arena.groups[0].block_count = 10;
  arena.groups[1].block_count = 4;
  for (GroupView& group : arena.groups) {
    for (auto& table : group.tables) table = std::make_unique<EmptyTable>();
    group.packed_bytes = {1024, 512, 512};
  }
  arena.groups[1].tables[GroupView::index(RegionSet::kReplicated)].reset();
  arena.slot_bytes = 4096;
  arena.slots.resize(3);
  return arena;
}

ipc::StageRequest make_request() {
  ipc::StageRequest request;
  request.id = 5;
  request.slot = 2;
  request.blocks = {0, 9, 3, 3};
  return request;
}

TEST(StepPlanTest, SortsWorkByGroupAndRemembersVerifyPlaces) {
  const MappedArena arena = make_arena();
  ipc::Step step;
  step.decode_steps = 2;
  step.fills = {{GroupId{1}, BlockId{3}, 33}};
  step.reads = {{GroupId{1}, BlockId{0}}, {GroupId{1}, BlockId{0}}};
  step.verifies = {
      {GroupId{1}, BlockId{2}, 12}, {GroupId{0}, BlockId{9}, 9}, {GroupId{1}, BlockId{1}, 11}};
  const auto plan = plan_step(step, arena);
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(plan->size(), 2U);
  EXPECT_THAT((*plan)[0].verify_places, ElementsAre(1));
  EXPECT_THAT((*plan)[1].verify_places, ElementsAre(0, 2));
  EXPECT_EQ((*plan)[1].verifies[1].seed, 11U);
  EXPECT_EQ((*plan)[1].fills[0].id, 3U);
  EXPECT_THAT((*plan)[1].reads, ElementsAre(0, 0));
}

TEST(StepPlanTest, LeavesOutGroupsWithoutWork) {
  ipc::Step step;
  step.fills = {{GroupId{1}, BlockId{3}, 33}};
  const auto plan = plan_step(step, make_arena());
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(plan->size(), 1U);
  EXPECT_EQ((*plan)[0].group, 1U);
}

TEST(StepPlanTest, RefusesUnknownGroupInEveryList) {
  const MappedArena arena = make_arena();
  ipc::Step fill;
  fill.fills = {{GroupId{2}, BlockId{0}, 0}};
  ipc::Step read;
  read.reads = {{GroupId{0xFFFFFFFF}, BlockId{0}}};
  ipc::Step verify;
  verify.verifies = {{GroupId{2}, BlockId{0}, 0}};
  for (const ipc::Step& step : {fill, read, verify}) {
    const auto plan = plan_step(step, arena);
    ASSERT_FALSE(plan.has_value());
    EXPECT_EQ(plan.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(plan.error().message, HasSubstr("the arena has 2 groups"));
  }
}

TEST(StepPlanTest, RefusesBlockBeyondItsGroup) {
  ipc::Step step;
  step.reads = {{GroupId{0}, BlockId{9}}, {GroupId{1}, BlockId{4}}};
  const auto plan = plan_step(step, make_arena());
  ASSERT_FALSE(plan.has_value());
  EXPECT_THAT(plan.error().message, HasSubstr("block 4 of group 1, which has 4"));
}

TEST(StepPlanTest, RefusesABlockFilledTwice) {
  ipc::Step step;
  step.fills = {
      {GroupId{0}, BlockId{3}, 1}, {GroupId{0}, BlockId{4}, 1}, {GroupId{0}, BlockId{3}, 2}};
  const auto plan = plan_step(step, make_arena());
  ASSERT_FALSE(plan.has_value());
  EXPECT_THAT(plan.error().message, HasSubstr("block 3 of group 0 is filled twice"));
}

TEST(StepPlanTest, RefusesEndlessDecoding) {
  ipc::Step step;
  step.decode_steps = kMaxDecodeSteps + 1;
  EXPECT_FALSE(plan_step(step, make_arena()).has_value());
}

TEST(StageCheckTest, AcceptsWhatExactlyFitsASlot) {
  EXPECT_TRUE(check_stage_request(make_request(), make_arena(), 0).has_value());
}

TEST(StageCheckTest, RefusesOneBlockTooMany) {
  auto request = make_request();
  request.blocks.push_back(1);
  const auto status = check_stage_request(request, make_arena(), 0);
  ASSERT_FALSE(status.has_value());
  EXPECT_THAT(status.error().message, HasSubstr("5 blocks of 1024 bytes exceed a slot of 4096"));
}

TEST(StageCheckTest, RefusesEveryFieldOutOfRange) {
  const MappedArena arena = make_arena();
  auto group = make_request();
  group.group = GroupId{2};
  auto slot = make_request();
  slot.slot = 3;
  auto set = make_request();
  set.group = GroupId{1};
  set.blocks = {0};
  set.set = RegionSet::kReplicated;
  auto block = make_request();
  block.blocks = {10};
  auto none = make_request();
  none.blocks.clear();
  for (const auto& request : {group, slot, set, block, none}) {
    const auto status = check_stage_request(request, arena, 0);
    ASSERT_FALSE(status.has_value());
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(status.error().message, HasSubstr("request 5"));
  }
}

TEST(StageCheckTest, RefusesStagingInAnArenaWithoutRing) {
  MappedArena arena = make_arena();
  arena.slots.clear();
  EXPECT_FALSE(check_stage_request(make_request(), arena, 0).has_value());
}

constexpr std::uint64_t kPoolBytes = 10'000;

/// All of what is sharded in one place, what is replicated in two; the last one ends with the pool.
ipc::StageRequest make_straight_request() {
  ipc::StageRequest request = make_request();
  request.kind = ipc::StageKind::kStore;
  request.parts = {{RegionSet::kSharded, 0, 4, 0},
                   {RegionSet::kReplicated, 0, 1, 3000},
                   {RegionSet::kReplicated, 1, 3, kPoolBytes - 1536}};
  return request;
}

TEST(StageCheckTest, AcceptsPartsUpToTheEndOfThePool) {
  auto request = make_straight_request();
  EXPECT_TRUE(check_stage_request(request, make_arena(), kPoolBytes).has_value());
  EXPECT_EQ(stage_bytes(request, make_arena()), 8U * 512U);
  request.slot = 99;  // there is none
  request.kind = ipc::StageKind::kLoad;
  EXPECT_TRUE(check_stage_request(request, make_arena(), kPoolBytes).has_value());
  EXPECT_EQ(stage_bytes(make_request(), make_arena()), 4U * 1024U);
}

TEST(StageCheckTest, RefusesEveryPartThatIsOutOfRange) {
  const MappedArena arena = make_arena();
  constexpr std::uint64_t kMost = ~std::uint64_t{0};
  constexpr std::uint32_t kMany = ~std::uint32_t{0};
  using Part = ipc::StagePart;
  std::vector<ipc::StageRequest> wrong;
  for (const Part& part :
       {Part{RegionSet::kSharded, 0, 4, kPoolBytes - 2047}, Part{RegionSet::kSharded, 0, 1, kMost},
        Part{RegionSet::kSharded, 0, 5, 0}, Part{RegionSet::kSharded, 4, 1, 0},
        Part{RegionSet::kSharded, kMany, 4, 0}, Part{RegionSet::kSharded, 1, kMany, 0},
        Part{RegionSet::kSharded, 0, 0, 0}}) {
    auto request = make_straight_request();
    request.parts[1] = part;
    wrong.push_back(request);
  }
  auto set = make_straight_request();
  set.group = GroupId{1};
  set.blocks = {0, 1, 2, 3};
  wrong.push_back(set);
  auto group = make_straight_request();
  group.group = GroupId{2};
  wrong.push_back(group);
  auto block = make_straight_request();
  block.blocks[2] = 10;
  wrong.push_back(block);
  auto none = make_straight_request();
  none.parts.clear();
  wrong.push_back(none);
  auto many = make_straight_request();
  many.parts.assign(2 * many.blocks.size() + 1, {RegionSet::kSharded, 0, 1, 0});
  wrong.push_back(many);
  auto layers = make_straight_request();
  layers.layers.emplace();
  layers.layers->range = {0, 1};
  wrong.push_back(layers);
  auto staged = make_straight_request();
  staged.kind = ipc::StageKind::kGather;
  wrong.push_back(staged);
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    const auto status = check_stage_request(wrong[i], arena, kPoolBytes);
    ASSERT_FALSE(status.has_value()) << i;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(status.error().message, HasSubstr("request 5"));
  }
  // No pool was named.
  EXPECT_FALSE(check_stage_request(make_straight_request(), arena, 0).has_value());
}

}  // namespace
}  // namespace kvferry::worker
