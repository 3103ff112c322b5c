// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "scheduler/batch_plan.hpp"

#include "kvferry/ipc/model/geometry.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace kvferry::worker {
namespace {

using testing::IsEmpty;
using testing::SizeIs;

/// Four tokens a block; all of them, a window of two blocks, and a state.
ipc::Geometry hybrid() {
  ipc::Geometry geometry;
  geometry.name = "hybrid";
  geometry.tokens_per_block = 4;
  geometry.groups.resize(3);
  geometry.groups[1].rule = ipc::HitRule::kSlidingWindow;
  geometry.groups[1].window_blocks = 2;
  geometry.groups[2].rule = ipc::HitRule::kLastState;
  return geometry;
}

/// Holds block 10 * position + group at each position.
Sequence sequence_of(std::uint32_t tokens, std::uint32_t computed, std::uint32_t groups = 3) {
  Sequence sequence;
  for (std::uint32_t i = 0; i < tokens; ++i) {
    sequence.tokens.push_back(i);
    sequence.inputs.push_back(1000 + i);
  }
  sequence.computed = computed;
  sequence.table.resize(groups);
  for (std::uint32_t g = 0; g < groups; ++g) {
    for (std::uint32_t position = 0; position <= (tokens - 1) / 4; ++position) {
      sequence.table[g][position] = {ipc::BlockId{10 * position + g}, false};
    }
  }
  return sequence;
}

template <typename Items> Items of_group(const Items& items, std::uint32_t group) {
  Items found;
  for (const auto& item : items) {
    if (item.group.value == group) found.push_back(item);
  }
  return found;
}

TEST(BatchPlanTest, EveryTokenIsWrittenOnceAndTheStateBehindTheLastOfABlock) {
  const ipc::Geometry geometry = hybrid();
  Sequence sequence = sequence_of(10, 1);
  ipc::Decode pass;
  ASSERT_TRUE(add_to_pass(geometry, {}, sequence, pass));
  EXPECT_EQ(sequence.planned, 10U);
  EXPECT_EQ(pass.sequences, 1U);
  for (const std::uint32_t group : {0U, 1U}) {
    const auto writes = of_group(pass.writes, group);
    ASSERT_THAT(writes, SizeIs(9));
    for (std::uint32_t i = 0; i < writes.size(); ++i) {
      const std::uint32_t token = i + 1;
      EXPECT_EQ(writes[i].block.value, 10 * (token / 4) + group);
      EXPECT_EQ(writes[i].first_token, token % 4);
      EXPECT_EQ(writes[i].tokens, 1U);
      EXPECT_EQ(writes[i].input, 1000U + token);
    }
  }
  const auto states = of_group(pass.writes, 2);
  ASSERT_THAT(states, SizeIs(3));
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(states[i].block.value, 10 * i + 2);
    EXPECT_EQ(states[i].tokens, 4U);
    EXPECT_EQ(states[i].input, 1000U + std::min(4 * i + 3, 9U));
  }
}

TEST(BatchPlanTest, AttentionReadsWhatTheRuleOfEachGroupSays) {
  const ipc::Geometry geometry = hybrid();
  Sequence sequence = sequence_of(14, 13);
  ipc::Decode pass;
  pass.sequences = 5;
  ASSERT_TRUE(add_to_pass(geometry, {}, sequence, pass));
  const auto all = of_group(pass.reads, 0);
  ASSERT_THAT(all, SizeIs(4));
  for (std::uint32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(all[i].position, i);
    EXPECT_EQ(all[i].block.value, 10 * i);
    EXPECT_EQ(all[i].tokens, i == 3 ? 2U : 4U);
    EXPECT_EQ(all[i].sequence, 5U);
  }
  const auto window = of_group(pass.reads, 1);
  ASSERT_THAT(window, SizeIs(2));
  EXPECT_EQ(window[0].position, 2U);
  EXPECT_EQ(window[1].tokens, 2U);
  const auto state = of_group(pass.reads, 2);
  ASSERT_THAT(state, SizeIs(1));
  EXPECT_EQ(state[0].position, 3U);
  EXPECT_EQ(state[0].tokens, 4U);
}

TEST(BatchPlanTest, BlocksOutOfTheWindowAreNotWritten) {
  const ipc::Geometry geometry = hybrid();
  Sequence sequence = sequence_of(16, 0);
  for (std::uint32_t position = 0; position < 2; ++position) sequence.table[1].erase(position);
  for (std::uint32_t position = 0; position < 3; ++position) sequence.table[2].erase(position);
  ipc::Decode pass;
  ASSERT_TRUE(add_to_pass(geometry, {}, sequence, pass));
  EXPECT_THAT(of_group(pass.writes, 1), SizeIs(8));
  EXPECT_THAT(of_group(pass.writes, 2), SizeIs(1));
}

TEST(BatchPlanTest, APrefixThatIsAllThereIsOnlyRead) {
  const ipc::Geometry geometry = hybrid();
  Sequence sequence = sequence_of(8, 8);
  ipc::Decode pass;
  ASSERT_TRUE(add_to_pass(geometry, {}, sequence, pass));
  EXPECT_THAT(pass.writes, IsEmpty());
  EXPECT_THAT(pass.reads, SizeIs(2 + 2 + 1));
}

TEST(BatchPlanTest, ALongPromptTakesSeveralPassesAndReadsInTheLast) {
  const ipc::Geometry geometry = hybrid();
  const PassLimits limits{.writes = 12, .reads = 100, .sequences = 4};
  Sequence sequence = sequence_of(10, 0);
  std::multiset<std::pair<std::uint32_t, std::uint32_t>> written;
  int passes = 0;
  while (sequence.computed < 10) {
    ASSERT_LT(passes++, 10);
    ipc::Decode pass;
    ASSERT_TRUE(add_to_pass(geometry, limits, sequence, pass));
    EXPECT_LE(pass.writes.size(), limits.writes);
    EXPECT_EQ(pass.reads.empty(), sequence.planned < 10);
    for (const auto& write : of_group(pass.writes, 0)) {
      written.emplace(write.block.value, write.first_token);
    }
    sequence.computed = sequence.planned;
  }
  EXPECT_EQ(passes, 3);
  EXPECT_EQ(written.size(), 10U);
  EXPECT_EQ((std::set(written.begin(), written.end())).size(), 10U);
}

TEST(BatchPlanTest, AFullPassTakesNoMore) {
  const ipc::Geometry geometry = hybrid();
  const PassLimits limits{.writes = 9, .reads = 100, .sequences = 2};
  Sequence first = sequence_of(3, 0);
  Sequence second = sequence_of(3, 0);
  Sequence cached = sequence_of(4, 4);
  Sequence fourth = sequence_of(4, 4);
  ipc::Decode pass;
  ASSERT_TRUE(add_to_pass(geometry, limits, first, pass));
  // The state takes one of them, whatever the number of tokens.
  EXPECT_THAT(pass.writes, SizeIs(7));
  const ipc::Decode before = pass;
  EXPECT_FALSE(add_to_pass(geometry, limits, second, pass)) << "there is no room for a token of it";
  EXPECT_EQ(pass.writes.size(), before.writes.size());
  EXPECT_TRUE(add_to_pass(geometry, limits, cached, pass)) << "it writes nothing";
  EXPECT_FALSE(add_to_pass(geometry, limits, fourth, pass)) << "two sequences are all";
}

TEST(BatchPlanTest, TheFirstSequenceGoesWhateverItReads) {
  const ipc::Geometry geometry = hybrid();
  const PassLimits limits{.writes = 100, .reads = 3, .sequences = 4};
  Sequence longer = sequence_of(40, 40);
  Sequence shorter = sequence_of(4, 4);
  ipc::Decode pass;
  EXPECT_TRUE(add_to_pass(geometry, limits, longer, pass));
  EXPECT_FALSE(add_to_pass(geometry, limits, shorter, pass));
}

}  // namespace
}  // namespace kvferry::worker
