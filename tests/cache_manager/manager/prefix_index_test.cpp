// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/prefix_index.hpp"

#include <gtest/gtest.h>

#include <array>
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

ipc::GroupRule group_with(ipc::HitRule rule, std::uint32_t window = 0) { return {rule, window}; }

class PrefixIndexTest : public testing::Test {
 protected:
  /// As an earlier manager has left it.
  PrefixIndex::Found found(std::uint64_t block, const Digest& root) {
    return {{root, digest(block), ipc::GroupId{0}},
            {},
            std::make_shared<const HostBlock>(pool_, *pool_.allocate(shape_of()))};
  }
  PrefixIndex::Token reserve(std::uint64_t block, std::uint32_t group = 0, Digest before = {}) {
    const ipc::ReservedSlot slot = index_.reserve(
        client_, {root_, digest(block), ipc::GroupId{group}}, before, shape_of(group), alone());
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
  /// As an engine does: it looks, and then uses what it has found.
  std::uint32_t usable(const std::vector<Digest>& prefix,
                       const std::vector<ipc::GroupRule>& rules) {
    return look_and_use(index_, prefix, rules);
  }
  std::uint32_t look_and_use(PrefixIndex& index,
                             const std::vector<Digest>& prefix,
                             const std::vector<ipc::GroupRule>& rules) {
    const std::uint32_t found = index.lookup(root_, prefix, rules).usable_prefix;
    index.use(root_, std::span(prefix).first(found), static_cast<std::uint32_t>(rules.size()));
    const auto view = ipc::PrefixTableView::map(index.table().fd(), index.table().size_bytes());
    EXPECT_TRUE(view.has_value());
    if (view) {
      EXPECT_EQ(view->match(root_, prefix, rules).usable, found) << "in the table";
    }
    return found;
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
  PrefixIndex index_{pool_, "lru"};
  std::vector<ipc::GroupRule> full_{group_with(ipc::HitRule::kFull)};
};

TEST_F(PrefixIndexTest, ABatchEvictsWhatItNeedsAtOnceAndLiesTogether) {
  const SlabShape small = shape_of(0, 256);
  std::uint64_t stored = 0;
  while (index_.stats().evicted == 0) {
    const auto slot =
        index_.reserve(client_, {root_, digest(stored++), ipc::GroupId{0}}, {}, small, alone());
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

TEST_F(PrefixIndexTest, SecondReservationOfAKeyIsInUseUntilItIsThere) {
  const auto again = [this] {
    return index_.reserve(other_, {root_, digest(0), ipc::GroupId{0}}, {}, shape_of(), alone())
        .outcome;
  };
  const PrefixIndex::Token token = reserve(0);
  EXPECT_EQ(again(), ReserveOutcome::kInUse);
  (void)index_.begin_fill(client_, token);
  EXPECT_EQ(again(), ReserveOutcome::kInUse) << "it may fail yet";
  index_.commit(token);
  EXPECT_EQ(again(), ReserveOutcome::kAlreadyThere);
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
  const std::vector<ipc::GroupRule> window{group_with(ipc::HitRule::kSlidingWindow, 2)};
  store(2);
  store(3);
  EXPECT_EQ(usable(blocks(4), window), 4U);
  EXPECT_EQ(usable(blocks(3), window), 0U);
  store(0);
  EXPECT_EQ(usable(blocks(2), window), 1U);
}

TEST_F(PrefixIndexTest, StateGroupNeedsTheLastBlock) {
  const std::vector<ipc::GroupRule> groups{group_with(ipc::HitRule::kFull),
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

// A parent that is used again last would go before its child by recency alone.
TEST_F(PrefixIndexTest, WhatContinuesABlockGoesBeforeIt) {
  for (std::uint64_t i = 0; i < 16; ++i) {
    const PrefixIndex::Token token = reserve(i, 0, i == 0 ? Digest{} : digest(i - 1));
    (void)index_.begin_fill(client_, token);
    ASSERT_TRUE(index_.commit(token));
  }
  // Stored first to last: the first one is the oldest. What is stored now goes after it.
  for (std::uint32_t newer = 1; newer <= 5; ++newer) {
    store(100 + newer);
    EXPECT_EQ(index_.stats().evicted, newer);
    ASSERT_EQ(usable(blocks(16), full_), 16 - newer) << "from its end";
    for (std::uint32_t i = 1; i <= newer; ++i) ASSERT_EQ(usable({digest(100 + i)}, full_), 1U);
  }
}

TEST_F(PrefixIndexTest, WhatAReservationContinuesStaysUntilThatIsOver) {
  store(0);
  const PrefixIndex::Token next = reserve(1, 0, digest(0));
  for (std::uint64_t i = 0; i < 30; ++i) store(100 + i);
  EXPECT_EQ(usable(blocks(1), full_), 1U);
  for (std::uint64_t i = 0; i < 30; ++i) store(200 + i);
  EXPECT_EQ(usable(blocks(1), full_), 1U);
  index_.discard(next);
  for (std::uint64_t i = 0; i < 30; ++i) store(300 + i);
  EXPECT_EQ(usable(blocks(1), full_), 0U);
  // The same of one that became visible meanwhile.
  const PrefixIndex::Token first = reserve(0);
  const PrefixIndex::Token second = reserve(1, 0, digest(0));
  (void)index_.begin_fill(client_, first);
  ASSERT_TRUE(index_.commit(first));
  for (std::uint64_t i = 0; i < 30; ++i) store(400 + i);
  (void)index_.begin_fill(client_, second);
  ASSERT_TRUE(index_.commit(second));
  EXPECT_EQ(usable(blocks(2), full_), 2U);
  for (std::uint64_t i = 0; i < 30; ++i) store(500 + i);
  EXPECT_EQ(index_.stats().visible, 16U);
  EXPECT_EQ(usable(blocks(2), full_), 0U);
}

// As jobs end: all of a store's blocks at once.
TEST_F(PrefixIndexTest, BlocksOfOneStoreGoFromTheirEndWhateverIsRead) {
  for (const std::string_view name : eviction_policies()) {
    HostPool pool(kPool);
    PrefixIndex index(pool, name);
    Extent extent;
    const auto stored = [&](std::uint64_t block, Digest before) {
      extent = {};
      const auto slot = index.reserve(client_, {root_, digest(block), ipc::GroupId{0}}, before,
                                      shape_of(), extent);
      EXPECT_EQ(slot.outcome, ReserveOutcome::kReserved);
      (void)index.begin_fill(client_, slot.slot);
      return slot.slot;
    };
    std::vector<PrefixIndex::Token> job;
    for (std::uint64_t i = 0; i < 4; ++i)
      job.push_back(stored(i, i == 0 ? Digest{} : digest(i - 1)));
    index.discard(stored(50, {}));
    EXPECT_EQ(index.commit(job), std::vector<bool>(4, true));
    const HostBlockRef third = index.acquire({root_, digest(2), ipc::GroupId{0}});
    const HostBlockRef fourth = index.acquire({root_, digest(3), ipc::GroupId{0}});
    for (std::uint64_t i = 0; i < 40; ++i) (void)index.commit(stored(1000 + i, {}));
    EXPECT_EQ(index.lookup(root_, blocks(4), full_).usable_prefix, 4U) << name;
  }
}

TEST_F(PrefixIndexTest, CommitTellsWhatWasDroppedMeanwhile) {
  const std::vector<PrefixIndex::Token> job = {reserve(0), reserve(1, 0, digest(0)), reserve(2)};
  for (const PrefixIndex::Token token : job) (void)index_.begin_fill(client_, token);
  index_.discard(job[1]);
  EXPECT_EQ(index_.commit(job), (std::vector<bool>{true, false, true}));
  EXPECT_EQ(index_.stats().visible, 2U);
}

TEST_F(PrefixIndexTest, WhatIsAwaitedStays) {
  store(0);
  EXPECT_FALSE(index_.await({root_, digest(77), ipc::GroupId{0}}));
  ASSERT_TRUE(index_.await({root_, digest(0), ipc::GroupId{0}}));
  for (std::uint64_t i = 0; i < 30; ++i) store(100 + i);
  EXPECT_EQ(usable(blocks(1), full_), 1U);
  index_.stop_awaiting({root_, digest(0), ipc::GroupId{0}});
  for (std::uint64_t i = 0; i < 30; ++i) store(200 + i);
  EXPECT_EQ(usable(blocks(1), full_), 0U);
}

// Jobs end in any order.
TEST_F(PrefixIndexTest, WhatABlockContinuesIsKnownOnceThatIsThere) {
  const PrefixIndex::Token first = reserve(0);
  const PrefixIndex::Token second = reserve(1, 0, digest(0));
  for (const PrefixIndex::Token token : {second, first}) {
    (void)index_.begin_fill(client_, token);
    ASSERT_TRUE(index_.commit(token));
  }
  const auto view = ipc::PrefixTableView::map(index_.table().fd(), index_.table().size_bytes());
  ASSERT_TRUE(view.has_value());
  EXPECT_EQ(view->match(root_, blocks(2), full_).usable, 2U);
  for (std::uint64_t i = 2; i < 16; ++i) store(1000 + i);
  store(5000);
  EXPECT_EQ(usable(blocks(2), full_), 1U) << "its end goes first";
  store(5001);
  EXPECT_EQ(usable(blocks(2), full_), 1U) << "used just now";
}

TEST_F(PrefixIndexTest, WhatIsThereLearnsFromALaterStoreWhatItContinues) {
  store(0);
  store(1);
  const auto view = ipc::PrefixTableView::map(index_.table().fd(), index_.table().size_bytes());
  ASSERT_TRUE(view.has_value());
  EXPECT_EQ(view->match(root_, blocks(2), full_), (ipc::PrefixMatch{1, false}));
  const ipc::ReservedSlot again =
      index_.reserve(client_, {root_, digest(1), ipc::GroupId{0}}, digest(0), shape_of(), alone());
  EXPECT_EQ(again.outcome, ReserveOutcome::kAlreadyThere);
  EXPECT_EQ(view->match(root_, blocks(2), full_).usable, 2U);
}

TEST_F(PrefixIndexTest, AJobFromItsLastBlockToItsFirstIsOnePrefix) {
  std::vector<PrefixIndex::Token> job;
  for (std::uint64_t i = 8; i-- > 0;) {
    job.push_back(reserve(i, 0, i == 0 ? Digest{} : digest(i - 1)));
    (void)index_.begin_fill(client_, job.back());
  }
  EXPECT_EQ(index_.commit(job), std::vector<bool>(8, true));
  const auto view = ipc::PrefixTableView::map(index_.table().fd(), index_.table().size_bytes());
  ASSERT_TRUE(view.has_value());
  EXPECT_EQ(view->match(root_, blocks(8), full_).usable, 8U);
}

TEST_F(PrefixIndexTest, AJobWhoseBlocksContinueEachOtherInACircleEnds) {
  const std::vector<PrefixIndex::Token> job = {reserve(0, 0, digest(1)), reserve(1, 0, digest(0))};
  for (const PrefixIndex::Token token : job) (void)index_.begin_fill(client_, token);
  EXPECT_EQ(index_.commit(job), std::vector<bool>(2, true));
  EXPECT_EQ(index_.drop_root(root_, [](const auto&) { return false; }), 2U);
  EXPECT_EQ(index_.table().stats().entries, 0U);
}

// A block that was found behind a gap is not taken for what continues the one before the gap.
TEST_F(PrefixIndexTest, AUseDoesNotJoinOverAGap) {
  store(0);
  store(2);
  index_.use(root_, blocks(3), 1);
  store(1);
  index_.use(root_, blocks(3), 1);
  for (std::uint64_t i = 3; i < 16; ++i) store(1000 + i);
  store(5000);
  EXPECT_FALSE(index_.has({root_, digest(2), ipc::GroupId{0}})) << "the last one goes first";
  EXPECT_TRUE(index_.has({root_, digest(1), ipc::GroupId{0}}));
}

TEST_F(PrefixIndexTest, ALookIsNoUse) {
  for (std::uint64_t i = 0; i < 16; ++i) store(i);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(index_.lookup(root_, blocks(1), full_).usable_prefix, 1U);
  store(100);
  EXPECT_EQ(index_.lookup(root_, blocks(1), full_).usable_prefix, 0U) << "the oldest goes";
  index_.use(root_, std::array{digest(1), digest(500)}, 1);
  store(101);
  EXPECT_TRUE(index_.has({root_, digest(1), ipc::GroupId{0}})) << "it was used";
  EXPECT_FALSE(index_.has({root_, digest(2), ipc::GroupId{0}}));
}

TEST_F(PrefixIndexTest, TheTableShowsABlockOnItsWayAndWhenItIsThereOrGone) {
  const auto view = ipc::PrefixTableView::map(index_.table().fd(), index_.table().size_bytes());
  ASSERT_TRUE(view.has_value());
  const ipc::BlockKey key{root_, digest(0), ipc::GroupId{0}};
  const PrefixIndex::Token token = reserve(0);
  EXPECT_EQ(view->find(key), (ipc::TableEntry{true, 0}));
  EXPECT_EQ(view->match(root_, blocks(1), full_), (ipc::PrefixMatch{0, true}));
  (void)index_.begin_fill(client_, token);
  EXPECT_EQ(view->find(key), (ipc::TableEntry{true, 0}));
  (void)index_.commit(token);
  EXPECT_EQ(view->find(key), (ipc::TableEntry{false, 1}));
  EXPECT_EQ(index_.drop_root(root_, [](const auto&) { return false; }), 1U);
  EXPECT_EQ(view->find(key), std::nullopt);
  index_.discard(reserve(1));
  EXPECT_EQ(view->find({root_, digest(1), ipc::GroupId{0}}), std::nullopt);
  EXPECT_EQ(index_.table().stats().entries, 0U);
}

TEST_F(PrefixIndexTest, PoliciesAreByName) {
  EXPECT_THROW(PrefixIndex(pool_, "mru"), ipc::Exception);
  for (const std::string_view name : eviction_policies()) {
    HostPool pool(kPool);
    PrefixIndex index(pool, name);
    Extent extent;
    for (std::uint64_t block = 0; block < 200; ++block) {
      extent = {};
      const auto slot =
          index.reserve(client_, {root_, digest(block), ipc::GroupId{0}},
                        block % 4 == 0 ? Digest{} : digest(block - 1), shape_of(), extent);
      ASSERT_EQ(slot.outcome, ReserveOutcome::kReserved) << name << " " << block;
      (void)index.begin_fill(client_, slot.slot);
      ASSERT_TRUE(index.commit(slot.slot));
      if (block % 4 != 3) continue;
      std::vector<Digest> prefix;
      for (std::uint64_t i = block - 3; i <= block; ++i) prefix.push_back(digest(i));
      const auto found = index.lookup(root_, prefix, full_);
      std::uint32_t visible = 0;
      for (const auto presence : found.presence) {
        visible += presence == static_cast<std::uint8_t>(BlockPresence::kHit) ? 1U : 0U;
      }
      EXPECT_EQ(found.usable_prefix, visible) << name << ": a gap";
    }
    EXPECT_EQ(index.stats().visible, 16U) << name;
    EXPECT_EQ(index.stats().evicted, 184U) << name;
    EXPECT_EQ(index.drop_root(root_, [](const auto&) { return false; }), 16U) << name;
    EXPECT_EQ(pool.stats().blocks, 0U) << name;
  }
}

TEST_F(PrefixIndexTest, PinnedBlocksAreNotEvicted) {
  for (std::uint64_t i = 0; i < 16; ++i) {
    store(i);
  }
  EXPECT_EQ(index_.pin(client_, root_, blocks(20), 1), 16U);
  EXPECT_EQ(index_.pin(other_, root_, blocks(1), 1), 1U);
  EXPECT_EQ(index_.reserve(client_, {root_, digest(100), ipc::GroupId{0}}, {}, shape_of(), alone())
                .outcome,
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
        index_.reserve(client_, {root_, digest(i), ipc::GroupId{0}}, {}, small, alone());
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

TEST_F(PrefixIndexTest, BlocksOfAnEarlierManagerAreFoundUnlessTheirRootIsDroppedMeanwhile) {
  const Digest other = digest(1001);
  index_.await_roots(std::vector{root_, other});
  EXPECT_TRUE(index_.has_root(root_));
  const std::vector first{found(1, root_), found(2, other)};
  EXPECT_EQ(index_.adopt(first), 2U);
  EXPECT_EQ(index_.drop_root(root_, [](const ipc::IncarnationId&) { return false; }), 1U);
  EXPECT_FALSE(index_.has_root(root_));
  const std::vector second{found(3, root_), found(4, other)};
  EXPECT_EQ(index_.adopt(second), 1U) << "what comes behind a clear is not there again";
  EXPECT_FALSE(index_.has({root_, digest(3), ipc::GroupId{0}}));
  EXPECT_TRUE(index_.has({other, digest(4), ipc::GroupId{0}}));
  index_.forget_awaited_roots();
  const std::vector third{found(5, other)};
  EXPECT_EQ(index_.adopt(third), 0U);
}

}  // namespace
}  // namespace kvferry::cache_manager
