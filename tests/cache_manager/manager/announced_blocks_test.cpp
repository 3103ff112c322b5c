// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/prefix_index.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::Digest;
using ipc::ReserveOutcome;

constexpr std::uint64_t kPool = 16ULL * 4096;  // 16 blocks of one page.

Digest digest(std::uint64_t value) { return Digest::from_words(0xB10C, value); }

SlabShape shape_of() {
  SlabShape shape;
  shape.fingerprint = digest(99);
  shape.bytes.shard_bytes = 4096;
  return shape;
}

/// What an earlier manager has left, on its way into the index.
class AnnouncedBlocksTest : public testing::Test {
 protected:
  using Announced = PrefixIndex::Announced;

  void SetUp() override {
    index_.await_roots(std::vector{root_});
    index_.begin_announcing(std::vector<PrefixIndex::Expected>{{root_, 8}});
  }
  PrefixIndex::Found found(std::uint64_t block) {
    return {{root_, digest(block), ipc::GroupId{0}},
            {},
            std::make_shared<const HostBlock>(pool_, *pool_.allocate(shape_of()))};
  }
  Announced announce(std::uint64_t block, Digest before = {}) {
    PrefixIndex::Found one = found(block);
    one.before = before;
    const auto announced = index_.announce(std::move(one));
    EXPECT_TRUE(announced.has_value());
    return announced.value_or(0);
  }
  [[nodiscard]] ipc::BlockPresence presence(std::uint64_t block) {
    return static_cast<ipc::BlockPresence>(
        index_.lookup(root_, std::vector{digest(block)}, full_).presence.at(0));
  }
  [[nodiscard]] ReserveOutcome outcome(std::uint64_t block) {
    const ipc::ReservedSlot slot =
        index_.reserve(client_, {root_, digest(block), ipc::GroupId{0}}, {}, shape_of(), extent_);
    extent_ = {};
    if (slot.outcome == ReserveOutcome::kReserved) index_.discard(slot.slot);
    return slot.outcome;
  }
  /// Of the prefix of so many blocks, in the table that engines look at, too.
  [[nodiscard]] std::uint32_t usable(std::uint64_t count) {
    std::vector<Digest> prefix;
    for (std::uint64_t i = 0; i < count; ++i) prefix.push_back(digest(i));
    const std::uint32_t usable = index_.lookup(root_, prefix, full_).usable_prefix;
    const auto view = ipc::PrefixTableView::map(index_.table().fd(), index_.table().size_bytes());
    EXPECT_TRUE(view.has_value());
    if (view) {
      EXPECT_EQ(view->match(root_, prefix, full_).usable, usable) << "in the table";
    }
    return usable;
  }

  Extent extent_;
  const Digest root_ = digest(1000);
  const ipc::IncarnationId client_ = digest(2000);
  HostPool pool_{kPool};
  PrefixIndex index_{pool_, "lru"};
  const std::vector<ipc::GroupRule> full_{{ipc::HitRule::kFull, 0}};
};

TEST_F(AnnouncedBlocksTest, WhatMayStillComeIsPendingAndNotStoredAgainUntilItIsKnownNotTo) {
  const Digest other = digest(1001);
  EXPECT_EQ(presence(1), ipc::BlockPresence::kHitPending) << "nobody knows yet";
  EXPECT_EQ(outcome(1), ReserveOutcome::kInUse);
  EXPECT_EQ(index_.lookup(other, std::vector{digest(1)}, full_).presence.at(0),
            static_cast<std::uint8_t>(ipc::BlockPresence::kMiss));
  const Announced first = announce(0);
  index_.announced_all();
  EXPECT_EQ(presence(1), ipc::BlockPresence::kMiss);
  EXPECT_EQ(outcome(1), ReserveOutcome::kReserved);
  EXPECT_EQ(presence(0), ipc::BlockPresence::kHitPending);
  EXPECT_EQ(outcome(0), ReserveOutcome::kInUse);
  EXPECT_EQ(index_.acquire({root_, digest(0), ipc::GroupId{0}}), nullptr);
  EXPECT_EQ(index_.adopt(std::vector{first}, 1).visible, 1U);
  EXPECT_EQ(presence(0), ipc::BlockPresence::kHit);
  EXPECT_EQ(outcome(0), ReserveOutcome::kAlreadyThere);
}

TEST_F(AnnouncedBlocksTest, ABlockComesBehindThoseThatItContinuesWhateverTheirOrder) {
  const Announced third = announce(2, digest(1));
  const Announced first = announce(0);
  const Announced fourth = announce(3, digest(2));
  const Announced second = announce(1, digest(0));
  index_.announced_all();
  const std::vector order{third, fourth, first, second};
  const PrefixIndex::Adopted adopted = index_.adopt(order, 1);
  EXPECT_EQ(adopted.looked_at, 1U);
  EXPECT_EQ(adopted.visible, 3U) << "with what it continues";
  EXPECT_EQ(usable(4), 3U);
  EXPECT_EQ(index_.announced(), 1U);
  EXPECT_EQ(index_.adopt(std::span(order).subspan(1), 8).visible, 1U);
  EXPECT_EQ(usable(4), 4U);
  EXPECT_EQ(index_.announced(), 0U);
}

TEST_F(AnnouncedBlocksTest, BlocksThatWereConnectedComeBehindThoseThatTheyContinue) {
  const std::vector lie{announce(2, digest(1)), announce(3, digest(2)), announce(0),
                        announce(6, digest(5)), announce(1, digest(0)), announce(4, digest(3))};
  index_.announced_all();
  index_.connect(std::span(lie).first(4));
  index_.connect(std::span(lie).subspan(4));
  EXPECT_EQ(index_.adopt(std::vector{lie[1]}, 1).visible, 4U) << "with what it continues";
  EXPECT_EQ(usable(6), 4U);
  EXPECT_EQ(index_.adopt(lie, 8).visible, 2U) << "of one nobody has what is before it";
  EXPECT_EQ(usable(7), 5U);
  EXPECT_EQ(presence(6), ipc::BlockPresence::kHit);
}

TEST_F(AnnouncedBlocksTest, WhatWasConnectedToOneThatWentDoesNotContinueWhatIsInItsPlace) {
  const ipc::IncarnationId other = digest(2001);
  const Announced last = announce(2, digest(1));
  auto gone = found(1);
  gone.before = digest(0);
  const HostBlockRef block = gone.block;
  ASSERT_TRUE(index_.announce(std::move(gone)).has_value());
  index_.announced_all();
  index_.connect(std::vector{last});
  index_.drop_block(*block);
  // It takes the place, and comes to be visible.
  const ipc::ReservedSlot slot =
      index_.reserve(other, {root_, digest(7), ipc::GroupId{0}}, {}, shape_of(), extent_);
  ASSERT_EQ(slot.outcome, ReserveOutcome::kReserved);
  (void)index_.begin_fill(other, slot.slot);
  ASSERT_TRUE(index_.commit(slot.slot));
  EXPECT_EQ(index_.adopt(std::vector{last}, 8).visible, 1U);
  const auto view = ipc::PrefixTableView::map(index_.table().fd(), index_.table().size_bytes());
  ASSERT_TRUE(view.has_value());
  const auto entry = view->find({root_, digest(2), ipc::GroupId{0}});
  ASSERT_TRUE(entry.has_value());
  EXPECT_EQ(entry->run, 1U);
}

TEST_F(AnnouncedBlocksTest, AReservationInThePlaceOfADroppedBlockIsNotAdopted) {
  const std::vector announced{announce(0)};
  EXPECT_EQ(index_.drop_root(root_, [](const ipc::IncarnationId&) { return true; }), 0U);
  index_.announced_all();
  const ipc::ReservedSlot slot =
      index_.reserve(client_, {root_, digest(5), ipc::GroupId{0}}, {}, shape_of(), extent_);
  ASSERT_EQ(slot.outcome, ReserveOutcome::kReserved);
  EXPECT_EQ(index_.adopt(announced, 8).visible, 0U);
  EXPECT_EQ(presence(5), ipc::BlockPresence::kHitPending);
}

TEST_F(AnnouncedBlocksTest, BlocksThatContinueEachOtherInACircleAreAllThere) {
  const std::vector circle{announce(0, digest(2)), announce(1, digest(0)), announce(2, digest(1))};
  index_.announced_all();
  index_.connect(circle);
  EXPECT_EQ(index_.adopt(circle, 8).visible, 3U);
  for (const std::uint64_t block : {0U, 1U, 2U}) {
    EXPECT_EQ(presence(block), ipc::BlockPresence::kHit);
  }
}

TEST_F(AnnouncedBlocksTest, WhatIsDroppedBeforeItIsVisibleNeverIs) {
  const std::vector announced{announce(0), announce(1, digest(0))};
  EXPECT_EQ(pool_.stats().blocks, 2U);
  EXPECT_EQ(index_.drop_root(root_, [](const ipc::IncarnationId&) { return true; }), 0U);
  EXPECT_EQ(pool_.stats().blocks, 0U);
  EXPECT_FALSE(index_.has_root(root_));
  EXPECT_EQ(presence(2), ipc::BlockPresence::kMiss) << "nothing of it comes any more";
  EXPECT_EQ(index_.announce(found(3)), std::nullopt);
  index_.announced_all();
  EXPECT_EQ(index_.adopt(announced, 8).visible, 0U);
  index_.forget_awaited_roots();
  EXPECT_EQ(index_.adopt(announced, 8).visible, 0U);
}

TEST_F(AnnouncedBlocksTest, WhatAReservationContinuesStaysWhenItBecomesVisible) {
  const Announced first = announce(0);
  index_.announced_all();
  const ipc::ReservedSlot slot =
      index_.reserve(client_, {root_, digest(1), ipc::GroupId{0}}, digest(0), shape_of(), extent_);
  ASSERT_EQ(slot.outcome, ReserveOutcome::kReserved);
  EXPECT_EQ(index_.adopt(std::vector{first}, 8).visible, 1U);
  (void)index_.begin_fill(client_, slot.slot);
  EXPECT_TRUE(index_.commit(slot.slot));
  EXPECT_EQ(usable(2), 2U);
}

}  // namespace
}  // namespace kvferry::cache_manager
