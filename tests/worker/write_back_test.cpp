// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/write_back.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::BlockId;
using ipc::Digest;

Digest name(std::uint64_t value) { return Digest::from_words(5, value); }

const WritePolicy& back() {
  static const WritePolicy policy({.mode = WriteMode::kWriteBack});
  return policy;
}

/// Fills a free block, or one that it evicts, and keeps it as the most recent one.
BlockId fill(GroupIndex& index, std::uint64_t value, bool stored = false) {
  const auto block = index.allocate();
  EXPECT_TRUE(block.has_value());
  EXPECT_TRUE(index.announce(*block, name(value), name(value - 1)));
  index.make_valid(*block);
  if (stored) index.mark_stored(*block);
  index.release(*block);
  return *block;
}

std::vector<GroupIndex> one_group(std::uint32_t blocks) {
  std::vector<GroupIndex> groups;
  groups.emplace_back(blocks);
  return groups;
}

std::vector<std::uint64_t> values_of(const std::vector<EvictedBlock>& blocks) {
  std::vector<std::uint64_t> values;
  for (const EvictedBlock& block : blocks) {
    EXPECT_EQ(block.before, name(block.hash.low() - 1));
    values.push_back(block.hash.low());
  }
  return values;
}

TEST(WriteBackTest, WhileBlocksAreFreeNothingIsStored) {
  auto groups = one_group(4);
  fill(groups[0], 1);
  const WriteBackPlan plan =
      plan_write_back(groups, std::vector<std::uint64_t>{3}, std::vector<std::uint64_t>{0}, back());
  EXPECT_TRUE(plan.stores.empty());
  EXPECT_FALSE(plan.waits);
}

TEST(WriteBackTest, TheOldestBlocksBeyondTheFreeOnesAreStoredFirst) {
  auto groups = one_group(4);
  for (std::uint64_t i = 1; i <= 3; ++i) fill(groups[0], i);
  const WriteBackPlan plan =
      plan_write_back(groups, std::vector<std::uint64_t>{3}, std::vector<std::uint64_t>{0}, back());
  EXPECT_TRUE(plan.waits);
  EXPECT_EQ(values_of(plan.stores), (std::vector<std::uint64_t>{1, 2}));
}

TEST(WriteBackTest, WhatIsStoredAlreadyIsEvictedAtOnce) {
  auto groups = one_group(3);
  fill(groups[0], 1, true);
  fill(groups[0], 2);
  fill(groups[0], 3, true);
  const std::vector<std::uint64_t> none{0};
  EXPECT_FALSE(plan_write_back(groups, std::vector<std::uint64_t>{1}, none, back()).waits);
  const WriteBackPlan plan = plan_write_back(groups, std::vector<std::uint64_t>{3}, none, back());
  EXPECT_TRUE(plan.waits);
  EXPECT_EQ(values_of(plan.stores), std::vector<std::uint64_t>{2});
}

TEST(WriteBackTest, OtherPoliciesStoreNothingAtAnEviction) {
  auto groups = one_group(1);
  fill(groups[0], 1);
  const WritePolicy through;
  const WriteBackPlan plan = plan_write_back(groups, std::vector<std::uint64_t>{1},
                                             std::vector<std::uint64_t>{0}, through);
  EXPECT_TRUE(plan.stores.empty());
  EXPECT_FALSE(plan.waits);
  EXPECT_EQ(count_lost(groups, std::vector<std::uint64_t>{1}, through), 0U);
}

TEST(WriteBackTest, WhatIsUnderWayIsNotStoredTwiceAndIsWaitedFor) {
  auto groups = one_group(3);
  for (std::uint64_t i = 1; i <= 3; ++i) fill(groups[0], i);
  const std::vector<std::uint64_t> needed{2};
  const WriteBackPlan first =
      plan_write_back(groups, needed, std::vector<std::uint64_t>{0}, back());
  ASSERT_EQ(values_of(first.stores), (std::vector<std::uint64_t>{1, 2}));
  for (const EvictedBlock& block : first.stores) groups[0].acquire(block.block);
  const WriteBackPlan again =
      plan_write_back(groups, needed, std::vector<std::uint64_t>{2}, back());
  EXPECT_TRUE(again.stores.empty());
  EXPECT_TRUE(again.waits);
  for (std::size_t i = first.stores.size(); i-- > 0;) {
    groups[0].mark_stored(first.stores[i].block);
    groups[0].release_as_oldest(first.stores[i].block);
  }
  EXPECT_FALSE(plan_write_back(groups, needed, std::vector<std::uint64_t>{0}, back()).waits);
  EXPECT_EQ(groups[0].allocate(), first.stores[0].block);
  EXPECT_EQ(groups[0].allocate(), first.stores[1].block);
  EXPECT_TRUE(groups[0].find(name(3)));
}

TEST(WriteBackTest, WhoDoesNotWaitLosesWhatIsCounted) {
  auto groups = one_group(3);
  fill(groups[0], 1);
  fill(groups[0], 2, true);
  fill(groups[0], 3);
  EXPECT_EQ(count_lost(groups, std::vector<std::uint64_t>{2}, back()), 1U);
  EXPECT_EQ(count_lost(groups, std::vector<std::uint64_t>{3}, back()), 2U);
}

TEST(WriteBackTest, ABlockThatIsUsedWhileItIsStoredIsNotEvictedFirst) {
  auto groups = one_group(2);
  const BlockId block = fill(groups[0], 1);
  fill(groups[0], 2);
  groups[0].acquire(block);  // By the store.
  groups[0].acquire(block);  // By a request that found it.
  groups[0].mark_stored(block);
  groups[0].release_as_oldest(block);
  groups[0].release(block);
  EXPECT_EQ(groups[0].next_victims(1).front(), groups[0].find(name(2))->block);
}

// An engine that does as the plan says loses nothing, and hands nothing out that is being read.
TEST(WriteBackTest, NothingIsLostAndNothingIsReusedWhileItIsRead) {
  std::mt19937_64 random(9);
  auto groups = one_group(12);
  GroupIndex& index = groups[0];
  std::set<std::uint64_t> host;
  std::vector<EvictedBlock> reading;
  std::vector<std::uint64_t> under_way{0};
  std::uint64_t next = 1;
  std::uint64_t waits = 0;
  for (int i = 0; i < 5000; ++i) {
    if (!reading.empty() && random() % 3 == 0) {  // The stores end.
      for (std::size_t j = reading.size(); j-- > 0;) {
        host.insert(reading[j].hash.low());
        index.mark_stored(reading[j].block);
        index.release_as_oldest(reading[j].block);
      }
      reading.clear();
      under_way[0] = 0;
      continue;
    }
    const std::vector<std::uint64_t> needed{1 + random() % 6};
    const WriteBackPlan plan = plan_write_back(groups, needed, under_way, back());
    if (plan.waits) {
      ++waits;
      ASSERT_FALSE(plan.stores.empty() && reading.empty()) << "it would wait for nothing";
      for (const EvictedBlock& block : plan.stores) {
        index.acquire(block.block);
        reading.push_back(block);
      }
      under_way[0] += plan.stores.size();
      continue;
    }
    ASSERT_LE(needed[0], index.available());
    for (const BlockId victim : index.next_victims(needed[0])) {
      ASSERT_TRUE(host.contains(index.contents(victim).hash.low()));
    }
    std::set<std::uint32_t> read;
    for (const EvictedBlock& block : reading) read.insert(block.block.value);
    for (std::uint64_t n = 0; n < needed[0]; ++n) {
      ASSERT_FALSE(read.contains(fill(index, next++).value));
    }
  }
  EXPECT_GT(waits, 100U);
  EXPECT_GT(host.size(), 100U);
}

}  // namespace
}  // namespace kvferry::worker
