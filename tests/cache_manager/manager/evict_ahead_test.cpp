// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/evict_ahead.hpp"

#include "kvferry/ipc/os/event_loop.hpp"

#include <gtest/gtest.h>

#include <chrono>

namespace kvferry::cache_manager {
namespace {

using ipc::Digest;
using std::chrono_literals::operator""ms;

constexpr std::uint64_t kBlock = 4096;
constexpr std::uint64_t kBlocks = 2048;

class EvictAheadTest : public testing::Test {
 protected:
  void store(std::uint64_t blocks) {
    for (std::uint64_t i = 0; i < blocks; ++i) {
      Extent extent;
      const auto slot = index_.reserve(
          client_, {root_, Digest::from_words(1, ++next_), ipc::GroupId{0}}, {}, shape_, extent);
      ASSERT_EQ(slot.outcome, ipc::ReserveOutcome::kReserved);
      (void)index_.begin_fill(client_, slot.slot);
      ASSERT_TRUE(index_.commit(slot.slot));
    }
  }
  void turn() { loop_.run_once(ipc::Deadline::after(0ms)); }
  [[nodiscard]] std::uint64_t free_blocks() const { return pool_.free_bytes_for(shape_) / kBlock; }

  const SlabShape shape_ = [] {
    SlabShape shape;
    shape.fingerprint = Digest::from_words(9, 9);
    shape.bytes.shard_bytes = kBlock;
    return shape;
  }();
  const Digest root_ = Digest::from_words(2, 2);
  const ipc::IncarnationId client_ = Digest::from_words(3, 3);
  std::uint64_t next_ = 0;
  ipc::EventLoop loop_;
  HostPool pool_{kBlocks * kBlock};
  PrefixIndex index_{pool_, "lru"};
};

TEST_F(EvictAheadTest, AFewBlocksGoInEachTurnUntilTheHighMarkIsFree) {
  EvictAhead ahead(loop_, pool_, index_, {100, 300});
  store(kBlocks - 205);
  ahead.look();
  turn();
  EXPECT_EQ(ahead.evicted(), 0U) << "the low mark is still free";
  store(5);
  ahead.look();
  std::uint64_t turns = 0;
  for (std::uint64_t before = free_blocks();; before = free_blocks()) {
    turn();
    if (free_blocks() == before) break;
    EXPECT_LE(free_blocks() - before, EvictAhead::kBlocksInATurn);
    ++turns;
  }
  EXPECT_EQ(free_blocks(), 615U) << "30 % of 2,048";
  EXPECT_EQ(turns, 4U) << "of 415 blocks";
  EXPECT_EQ(ahead.evicted(), index_.stats().evicted);
  ahead.look();
  turn();
  EXPECT_EQ(free_blocks(), 615U);
  store(400);
  EXPECT_EQ(index_.stats().evicted, ahead.evicted()) << "a store found room";
}

TEST_F(EvictAheadTest, WhatCannotGoIsNotAskedForAgainUntilSomethingIsStored) {
  EvictAhead ahead(loop_, pool_, index_, {100, 300});
  store(kBlocks);
  std::vector<Digest> all;
  for (std::uint64_t i = 1; i <= kBlocks; ++i) all.push_back(Digest::from_words(1, i));
  ASSERT_EQ(index_.pin(client_, root_, all, 1), kBlocks);
  for (int i = 0; i < 3; ++i) {
    ahead.look();
    turn();
  }
  EXPECT_EQ(ahead.evicted(), 0U);
  (void)index_.unpin(client_, root_, all, 1);
  ahead.look();
  turn();
  EXPECT_EQ(ahead.evicted(), 0U);
  store(1);
  ahead.look();
  turn();
  EXPECT_EQ(ahead.evicted(), EvictAhead::kBlocksInATurn);
}

TEST_F(EvictAheadTest, WithoutMarksNothingGoes) {
  EvictAhead ahead(loop_, pool_, index_, {});
  store(kBlocks);
  ahead.look();
  turn();
  EXPECT_EQ(index_.stats().evicted, 0U);
}

TEST_F(EvictAheadTest, PostedWorkMayComeAfterItsEnd) {
  store(kBlocks);
  {
    EvictAhead ahead(loop_, pool_, index_, {100, 300});
    ahead.look();
  }
  turn();
  EXPECT_EQ(index_.stats().evicted, 0U);
}

}  // namespace
}  // namespace kvferry::cache_manager
