// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What the prefix index tells of blocks that come and go.
#include "manager/prefix_index.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::Digest;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

constexpr std::uint64_t kPool = 16ULL * 4096;  // 16 blocks of one page.

Digest digest(std::uint64_t value) { return Digest::from_words(0xB10C, value); }

SlabShape shape_of(std::uint64_t bytes = 4096) {
  SlabShape shape;
  shape.fingerprint = digest(99);
  shape.bytes.shard_bytes = bytes;
  return shape;
}

class Recorder : public PrefixObserver {
 public:
  void stored(const ipc::BlockKey& key, const Digest& before) override {
    told.push_back(fmt::format("+{}:{} after {}", key.group.value, key.block.low(), before.low()));
    picture.emplace(key.group.value, key.block.low());
  }
  void removed(const ipc::BlockKey& key) override {
    told.push_back(fmt::format("-{}:{}", key.group.value, key.block.low()));
    EXPECT_EQ(picture.erase({key.group.value, key.block.low()}), 1U) << "removed, and not there";
  }
  void emptied(const Digest& root) override { told.push_back(fmt::format("empty {}", root.low())); }
  std::vector<std::string> take() { return std::exchange(told, {}); }

  std::vector<std::string> told;
  std::set<std::pair<std::uint32_t, std::uint64_t>> picture;
};

class PrefixObserverTest : public testing::Test {
 protected:
  void SetUp() override { index_.add_observer(recorder_); }

  PrefixIndex::Token reserve(std::uint64_t block,
                             std::uint64_t before = 0,
                             std::uint32_t group = 0,
                             const SlabShape& shape = shape_of()) {
    Extent alone;
    const Digest behind = before == 0 ? Digest{} : digest(before);
    const auto slot =
        index_.reserve(client_, {root_, digest(block), ipc::GroupId{group}}, behind, shape, alone);
    EXPECT_EQ(slot.outcome, ipc::ReserveOutcome::kReserved);
    return slot.slot;
  }
  void store(std::uint64_t block, std::uint64_t before = 0, std::uint32_t group = 0) {
    const PrefixIndex::Token token = reserve(block, before, group);
    (void)index_.begin_fill(client_, token);
    ASSERT_TRUE(index_.commit(token));
  }
  /// What is visible, as a snapshot finds it.
  std::multiset<std::uint64_t> visible(std::size_t at_once) {
    std::multiset<std::uint64_t> found;
    std::size_t from = 0;
    do {
      from = index_.visit_visible(from, at_once, [&](const ipc::BlockKey& key, const Digest&) {
        found.insert(key.block.low());
      });
    } while (from != 0);
    return found;
  }

  Digest root_ = digest(1000);
  ipc::IncarnationId client_ = digest(2000);
  HostPool pool_{kPool};
  PrefixIndex index_{pool_, "lru"};
  Recorder recorder_;
};

TEST_F(PrefixObserverTest, ABlockIsToldWhenItBecomesVisibleAndNotBefore) {
  const PrefixIndex::Token token = reserve(1);
  (void)index_.begin_fill(client_, token);
  EXPECT_THAT(recorder_.take(), IsEmpty());
  ASSERT_TRUE(index_.commit(token));
  EXPECT_THAT(recorder_.take(), ElementsAre("+0:1 after 0"));
}

TEST_F(PrefixObserverTest, BlocksOfOneJobAreToldInItsOrder) {
  std::vector<PrefixIndex::Token> tokens;
  for (std::uint64_t block = 1; block <= 3; ++block) tokens.push_back(reserve(block, block - 1));
  for (const PrefixIndex::Token token : tokens) (void)index_.begin_fill(client_, token);
  (void)index_.commit(tokens);
  EXPECT_THAT(recorder_.take(), ElementsAre("+0:1 after 0", "+0:2 after 1", "+0:3 after 2"));
}

TEST_F(PrefixObserverTest, WhatWasNeverVisibleGoesInSilence) {
  index_.discard(reserve(1));
  (void)reserve(2);
  index_.drop_client(client_);
  EXPECT_THAT(recorder_.take(), IsEmpty());
}

TEST_F(PrefixObserverTest, EvictedBlocksAreTold) {
  for (std::uint64_t block = 1; block <= 40; ++block) store(block);
  EXPECT_EQ(index_.stats().evicted, 40U - index_.stats().visible);
  EXPECT_EQ(recorder_.picture.size(), index_.stats().visible);
  EXPECT_THAT(recorder_.told, testing::Contains("-0:1"));
}

TEST_F(PrefixObserverTest, AWholeSlabThatIsEvictedForAnotherShapeIsTold) {
  for (std::uint64_t block = 1; block <= 16; ++block) store(block);
  (void)recorder_.take();
  (void)reserve(100, 0, 0, shape_of(8192));
  EXPECT_EQ(recorder_.picture.size(), index_.stats().visible);
  EXPECT_LT(recorder_.picture.size(), 16U);
}

TEST_F(PrefixObserverTest, ADroppedRootIsToldAsEmptyAfterItsBlocks) {
  store(1);
  store(2, 1);
  store(1, 0, 1);
  (void)recorder_.take();
  EXPECT_EQ(index_.drop_root(root_, [](const auto&) { return false; }), 3U);
  auto told = recorder_.take();
  ASSERT_EQ(told.size(), 4U);
  EXPECT_EQ(told.back(), "empty 1000");
  told.pop_back();
  EXPECT_THAT(told, UnorderedElementsAre("-0:1", "-0:2", "-1:1"));
}

TEST_F(PrefixObserverTest, ARootOfWhichSomethingStaysIsNotEmpty) {
  store(1);
  store(2);
  const std::vector<Digest> pinned = {digest(2)};
  (void)index_.pin(digest(2001), root_, pinned, 1);
  (void)recorder_.take();
  (void)index_.drop_root(root_, [](const auto& client) { return client == digest(2001); });
  EXPECT_THAT(recorder_.take(), ElementsAre("-0:1"));
}

TEST_F(PrefixObserverTest, NobodyIsToldAfterTheObserverIsGone) {
  index_.remove_observer(recorder_);
  store(1);
  (void)index_.drop_root(root_, [](const auto&) { return false; });
  EXPECT_THAT(recorder_.take(), IsEmpty());
}

TEST_F(PrefixObserverTest, AVisitInSlicesFindsEachVisibleBlockOnce) {
  EXPECT_THAT(visible(4), IsEmpty());
  for (std::uint64_t block = 1; block <= 12; ++block) store(block);
  (void)reserve(13);
  for (const std::size_t at_once : {1U, 5U, 12U, 100U}) {
    const auto found = visible(at_once);
    EXPECT_EQ(found.size(), 12U) << at_once;
    EXPECT_EQ(std::set<std::uint64_t>(found.begin(), found.end()).size(), 12U) << at_once;
  }
}

TEST_F(PrefixObserverTest, WhatStaysVisibleDuringAVisitIsFoundWhateverComesAndGoes) {
  for (std::uint64_t block = 1; block <= 16; ++block) store(block);
  const std::vector<Digest> kept = {digest(3), digest(9), digest(16)};
  (void)index_.pin(client_, root_, kept, 1);
  std::multiset<std::uint64_t> found;
  std::size_t from = 0;
  std::uint64_t block = 100;
  do {
    from = index_.visit_visible(
        from, 3, [&](const ipc::BlockKey& key, const Digest&) { found.insert(key.block.low()); });
    store(block++);  // and another goes
  } while (from != 0);
  for (const std::uint64_t stays : {3U, 9U, 16U}) EXPECT_EQ(found.count(stays), 1U) << stays;
}

}  // namespace
}  // namespace kvferry::cache_manager
