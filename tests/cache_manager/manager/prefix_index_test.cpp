// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/prefix_index.hpp"

#include <gtest/gtest.h>

#include <numeric>

namespace kvferry::cache_manager {
namespace {

using ipc::BlockPresence;
using ipc::Digest;
using ipc::ReserveOutcome;

constexpr std::uint64_t kPool = 16ULL * 4096;  // 16 blocks of one page.

Digest digest(std::uint64_t value) { return Digest::from_words(0xB10C, value); }

SlabShape shape_of(std::uint32_t group = 0, std::uint64_t bytes = 4096) {
  SlabShape shape;
  shape.fingerprint = digest(99);
  shape.group = ipc::GroupId{group};
  shape.bytes.shard_bytes = bytes;
  return shape;
}

ipc::GroupSpec group_with(ipc::HitRule rule, std::uint32_t window = 0) {
  ipc::GroupSpec group;
  group.rule = rule;
  group.window_blocks = window;
  return group;
}

class PrefixIndexTest : public testing::Test {
 protected:
  PrefixIndex::Token reserve(std::uint64_t block, std::uint32_t group = 0) {
    const ipc::ReservedSlot slot = index_.reserve(
        client_, {root_, digest(block), ipc::GroupId{group}}, shape_of(group), alone());
    EXPECT_EQ(slot.outcome, ReserveOutcome::kReserved);
    return slot.slot;
  }
  void store(std::uint64_t block, std::uint32_t group = 0) {
    const PrefixIndex::Token token = reserve(block, group);
    (void)index_.begin_fill(client_, token);
    EXPECT_TRUE(index_.commit(token));
  }
  static std::vector<Digest> blocks(std::uint64_t count) {
    std::vector<Digest> all;
    for (std::uint64_t i = 0; i < count; ++i) {
      all.push_back(digest(i));
    }
    return all;
  }
  std::uint32_t usable(const std::vector<Digest>& prefix,
                       const std::vector<ipc::GroupSpec>& groups) {
    return index_.lookup(root_, prefix, groups).usable_prefix;
  }

  /// Of a slot that is part of no batch.
  Extent& alone() {
    extent_ = {};
    return extent_;
  }

  Extent extent_;
  Digest root_ = digest(1000);
  ipc::IncarnationId client_ = digest(2000);
  ipc::IncarnationId other_ = digest(2001);
  HostPool pool_{kPool};
  PrefixIndex index_{pool_};
  std::vector<ipc::GroupSpec> full_{group_with(ipc::HitRule::kFull)};
};

TEST_F(PrefixIndexTest, ABatchEvictsWhatItNeedsAtOnceAndLiesTogether) {
  const SlabShape small = shape_of(0, 256);
  std::uint64_t stored = 0;
  while (index_.stats().evicted == 0) {
    const auto slot =
        index_.reserve(client_, {root_, digest(stored++), ipc::GroupId{0}}, small, alone());
    ASSERT_EQ(slot.outcome, ReserveOutcome::kReserved);
    (void)index_.begin_fill(client_, slot.slot);
    ASSERT_TRUE(index_.commit(slot.slot));
  }
  Extent extent{.after = std::nullopt, .left = 6};
  std::vector<HostBlockRef> batch;
  for (int i = 0; i < 6; ++i) batch.push_back(index_.allocate(small, extent));
  for (std::size_t i = 0; i < batch.size(); ++i) {
    ASSERT_NE(batch[i], nullptr);
    EXPECT_EQ(batch[i]->slot().slab, batch[0]->slot().slab);
    EXPECT_EQ(batch[i]->slot().index, batch[0]->slot().index + i);
  }
  EXPECT_EQ(index_.stats().evicted, 1U + 6U) << "no more than it needs";
}

TEST_F(PrefixIndexTest, ReservedAndFillingBlocksArePending) {
  const PrefixIndex::Token token = reserve(0);
  EXPECT_EQ(index_.lookup(root_, blocks(1), full_).presence.at(0),
            static_cast<std::uint8_t>(BlockPresence::kHitPending));
  (void)index_.begin_fill(client_, token);
  const ipc::LookupReply reply = index_.lookup(root_, blocks(1), full_);
  EXPECT_EQ(reply.presence.at(0), static_cast<std::uint8_t>(BlockPresence::kHitPending));
  EXPECT_EQ(reply.usable_prefix, 0U);
}

TEST_F(PrefixIndexTest, CommittedBlockIsAHit) {
  store(0);
  const ipc::LookupReply reply = index_.lookup(root_, blocks(2), full_);
  EXPECT_EQ(reply.presence.at(0), static_cast<std::uint8_t>(BlockPresence::kHit));
  EXPECT_EQ(reply.presence.at(1), static_cast<std::uint8_t>(BlockPresence::kMiss));
  EXPECT_EQ(reply.usable_prefix, 1U);
}

TEST_F(PrefixIndexTest, AnotherRootIsAMiss) {
  store(0);
  EXPECT_EQ(index_.lookup(digest(1001), blocks(1), full_).usable_prefix, 0U);
}

TEST_F(PrefixIndexTest, DiscardedStoreLeavesNothing) {
  const PrefixIndex::Token token = reserve(0);
  {
    const HostBlockRef filled = index_.begin_fill(client_, token);
    index_.discard(token);
    EXPECT_EQ(pool_.stats().blocks, 1U) << "freed under the copier";
  }
  EXPECT_EQ(pool_.stats().blocks, 0U);
  EXPECT_EQ(usable(blocks(1), full_), 0U);
  EXPECT_EQ(index_.stats().reserved, 0U);
}

TEST_F(PrefixIndexTest, SecondReservationOfAKeyIsAlreadyThere) {
  (void)reserve(0);
  EXPECT_EQ(
      index_.reserve(other_, {root_, digest(0), ipc::GroupId{0}}, shape_of(), alone()).outcome,
      ReserveOutcome::kAlreadyThere);
}

TEST_F(PrefixIndexTest, ReservationBelongsToItsClient) {
  const PrefixIndex::Token token = reserve(0);
  EXPECT_EQ(index_.reservation(other_, token), nullptr);
  ASSERT_NE(index_.reservation(client_, token), nullptr);
  (void)index_.begin_fill(client_, token);
  EXPECT_EQ(index_.reservation(client_, token), nullptr) << "a slot can be filled once only";
}

TEST_F(PrefixIndexTest, FullGroupNeedsTheWholePrefix) {
  store(0);
  store(2);
  EXPECT_EQ(usable(blocks(3), full_), 1U);
  store(1);
  EXPECT_EQ(usable(blocks(3), full_), 3U);
}

TEST_F(PrefixIndexTest, SlidingWindowNeedsItsTrailingBlocks) {
  const std::vector<ipc::GroupSpec> window{group_with(ipc::HitRule::kSlidingWindow, 2)};
  store(2);
  store(3);
  EXPECT_EQ(usable(blocks(4), window), 4U);
  EXPECT_EQ(usable(blocks(3), window), 0U);
  store(0);
  EXPECT_EQ(usable(blocks(2), window), 1U);
}

TEST_F(PrefixIndexTest, StateGroupNeedsTheLastBlock) {
  const std::vector<ipc::GroupSpec> groups{group_with(ipc::HitRule::kFull),
                                           group_with(ipc::HitRule::kLastState)};
  for (std::uint64_t i = 0; i < 4; ++i) {
    store(i);
  }
  EXPECT_EQ(usable(blocks(4), groups), 0U);
  store(2, 1);
  EXPECT_EQ(usable(blocks(4), groups), 3U);
}

TEST_F(PrefixIndexTest, FullPoolEvictsTheLeafOfTheOldestPrefix) {
  for (std::uint64_t i = 0; i < 16; ++i) {
    store(i);
  }
  EXPECT_EQ(usable(blocks(16), full_), 16U);
  store(100);
  EXPECT_EQ(usable(blocks(16), full_), 15U) << "the last block of the prefix goes first";
  EXPECT_EQ(index_.stats().evicted, 1U);
}

TEST_F(PrefixIndexTest, PinnedBlocksAreNotEvicted) {
  for (std::uint64_t i = 0; i < 16; ++i) {
    store(i);
  }
  EXPECT_EQ(index_.pin(client_, root_, blocks(20), 1), 16U);
  EXPECT_EQ(index_.pin(other_, root_, blocks(1), 1), 1U);
  EXPECT_EQ(
      index_.reserve(client_, {root_, digest(100), ipc::GroupId{0}}, shape_of(), alone()).outcome,
      ReserveOutcome::kFull);
  EXPECT_EQ(index_.unpin(client_, root_, blocks(16), 1), 16U);
  EXPECT_EQ(index_.stats().pinned, 1U);
  store(100);
  EXPECT_EQ(usable(blocks(1), full_), 1U);
}

TEST_F(PrefixIndexTest, PinsAreCounted) {
  store(0);
  (void)index_.pin(client_, root_, blocks(1), 1);
  (void)index_.pin(client_, root_, blocks(1), 1);
  (void)index_.unpin(client_, root_, blocks(1), 1);
  EXPECT_EQ(index_.stats().pinned, 1U);
  (void)index_.unpin(client_, root_, blocks(1), 1);
  EXPECT_EQ(index_.stats().pinned, 0U);
  EXPECT_EQ(index_.unpin(client_, root_, blocks(1), 1), 0U);
}

TEST_F(PrefixIndexTest, BlocksBeingReadAreNotEvicted) {
  for (std::uint64_t i = 0; i < 16; ++i) {
    store(i);
  }
  std::vector<HostBlockRef> readers;
  for (std::uint64_t i = 0; i < 16; ++i) {
    readers.push_back(index_.acquire({root_, digest(i), ipc::GroupId{0}}));
    ASSERT_NE(readers.back(), nullptr);
  }
  EXPECT_EQ(index_.allocate(shape_of(), alone()), nullptr);
  readers.erase(readers.begin() + 3);
  EXPECT_NE(index_.allocate(shape_of(), alone()), nullptr);
  EXPECT_EQ(index_.acquire({root_, digest(3), ipc::GroupId{0}}), nullptr);
}

TEST_F(PrefixIndexTest, AnotherShapeGetsAWholeSlab) {
  const SlabShape small = shape_of(0, 1024);  // Four to a page.
  for (std::uint64_t i = 0; i < 64; ++i) {
    const ipc::ReservedSlot slot =
        index_.reserve(client_, {root_, digest(i), ipc::GroupId{0}}, small, alone());
    ASSERT_EQ(slot.outcome, ReserveOutcome::kReserved);
    (void)index_.begin_fill(client_, slot.slot);
    ASSERT_TRUE(index_.commit(slot.slot));
  }
  EXPECT_EQ(pool_.stats().free_pages, 0U);
  const HostBlockRef large = index_.allocate(shape_of(1, 4096), alone());
  EXPECT_NE(large, nullptr);
  EXPECT_LE(index_.stats().evicted, 16U) << "more than a slab was given up";
}

TEST_F(PrefixIndexTest, ShapeThatNeverFitsEvictsNothing) {
  store(0);
  EXPECT_EQ(index_.allocate(shape_of(1, 1ULL << 30U), alone()), nullptr);
  EXPECT_EQ(index_.stats().evicted, 0U);
  EXPECT_EQ(usable(blocks(1), full_), 1U);
}

TEST_F(PrefixIndexTest, DeadClientsReservationsAndPinsGo) {
  store(0);
  (void)index_.pin(client_, root_, blocks(1), 1);
  const PrefixIndex::Token reserved = reserve(1);
  const PrefixIndex::Token filling = reserve(2);
  (void)index_.begin_fill(client_, filling);
  index_.drop_client(client_);
  EXPECT_EQ(index_.reservation(client_, reserved), nullptr);
  EXPECT_EQ(index_.stats().pinned, 0U);
  EXPECT_EQ(index_.stats().reserved, 1U) << "what is being filled belongs to its job";
  EXPECT_TRUE(index_.commit(filling));
}

TEST_F(PrefixIndexTest, DroppedRootKeepsForeignPinsAndReaders) {
  store(0);
  store(1);
  store(2);
  (void)index_.pin(other_, root_, std::vector{digest(0)}, 1);
  (void)index_.pin(client_, root_, std::vector{digest(1)}, 1);
  const HostBlockRef reader = index_.acquire({root_, digest(2), ipc::GroupId{0}});
  const PrefixIndex::Token filling = reserve(3);
  const HostBlockRef filled = index_.begin_fill(client_, filling);
  EXPECT_EQ(index_.drop_root(root_, [this](const auto& id) { return id == other_; }), 2U);
  EXPECT_EQ(usable(blocks(4), full_), 1U);
  EXPECT_FALSE(index_.commit(filling)) << "a store that ends after the drop stays invisible";
  EXPECT_EQ(pool_.stats().blocks, 3U) << "reader and copier keep their slots";
  EXPECT_TRUE(index_.has_root(root_));
}

}  // namespace
}  // namespace kvferry::cache_manager
