// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "step_plan.hpp"

#include "stage_check.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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
  EXPECT_TRUE(check_stage_request(make_request(), make_arena()).has_value());
}

TEST(StageCheckTest, RefusesOneBlockTooMany) {
  auto request = make_request();
  request.blocks.push_back(1);
  const auto status = check_stage_request(request, make_arena());
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
    const auto status = check_stage_request(request, arena);
    ASSERT_FALSE(status.has_value());
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(status.error().message, HasSubstr("request 5"));
  }
}

TEST(StageCheckTest, RefusesStagingInAnArenaWithoutRing) {
  MappedArena arena = make_arena();
  arena.slots.clear();
  EXPECT_FALSE(check_stage_request(make_request(), arena).has_value());
}

}  // namespace
}  // namespace kvferry::worker
