// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Blocks that are stored with a priority, for a while.
#include "manager/prefix_index.hpp"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::Digest;
using ipc::ReserveOutcome;
using ipc::Retention;
using std::chrono_literals::operator""s;

constexpr std::uint64_t kBlock = 4096;

Digest block(std::uint64_t value) { return Digest::from_words(0xB10C, value); }

SlabShape shape() {
  SlabShape made;
  made.fingerprint = block(99);
  made.bytes.shard_bytes = kBlock;
  return made;
}

class PrefixRetentionTest : public testing::TestWithParam<std::string_view> {
 protected:
  PrefixRetentionTest() {
    index_.set_clock([this] { return now_; });
  }
  PrefixIndex::Token reserve(std::uint64_t value,
                             std::optional<Retention> retention,
                             std::uint64_t before) {
    Extent extent;
    const auto slot = index_.reserve(client_, {root_, block(value), ipc::GroupId{0}},
                                     before == 0 ? Digest{} : block(before), shape(), extent,
                                     {nullptr, retention});
    EXPECT_EQ(slot.outcome, ReserveOutcome::kReserved);
    return slot.slot;
  }
  void store(std::uint64_t value,
             std::optional<Retention> retention = {},
             std::uint64_t before = 0) {
    const PrefixIndex::Token token = reserve(value, retention, before);
    (void)index_.begin_fill(client_, token);
    EXPECT_TRUE(index_.commit(token));
  }
  /// Reserves what is there, with another retention.
  void store_again(std::uint64_t value, const Retention& retention) {
    Extent extent;
    const auto slot = index_.reserve(client_, {root_, block(value), ipc::GroupId{0}}, {}, shape(),
                                     extent, {nullptr, retention});
    EXPECT_EQ(slot.outcome, ReserveOutcome::kAlreadyThere);
  }
  /// Others' blocks, each for itself.
  void flood(int blocks) {
    for (int i = 0; i < blocks; ++i) {
      store(1'000'000 + next_);
      // Else its hand would never come round: what is behind that stays.
      if (GetParam() == "sieve") index_.use(root_, std::vector{block(1'000'000 + next_)}, 1);
      ++next_;
    }
  }
  [[nodiscard]] bool has(std::uint64_t value) const {
    return index_.has({root_, block(value), ipc::GroupId{0}});
  }

  const Digest root_ = block(1);
  const ipc::IncarnationId client_ = block(2);
  ipc::TimePoint now_ = ipc::MonotonicClock::now();
  std::uint64_t next_ = 0;
  HostPool pool_{16 * kBlock};
  PrefixIndex index_{pool_, GetParam()};
};

TEST_P(PrefixRetentionTest, ABlockStaysForItsTimeAndGoesLikeAnyOtherThen) {
  store(1, Retention{80, 60s});
  EXPECT_EQ(index_.retained(), 1U);
  flood(200);
  EXPECT_TRUE(has(1));
  now_ += 59s;
  flood(200);
  EXPECT_TRUE(has(1));
  now_ += 1s;
  flood(200);
  EXPECT_FALSE(has(1));
  EXPECT_EQ(index_.retained(), 0U);
}

TEST_P(PrefixRetentionTest, WithoutATimeItStaysForAsLongAsItIsThere) {
  store(1, Retention{80, 0s});
  now_ += std::chrono::hours(1000);
  flood(200);
  EXPECT_TRUE(has(1));
}

TEST_P(PrefixRetentionTest, TheTimeRunsFromTheReservationOn) {
  const PrefixIndex::Token token = reserve(1, Retention{80, 60s}, 0);
  now_ += 50s;
  (void)index_.begin_fill(client_, token);
  ASSERT_TRUE(index_.commit(token));
  flood(200);
  EXPECT_TRUE(has(1));
  now_ += 10s;
  flood(200);
  EXPECT_FALSE(has(1));
}

TEST_P(PrefixRetentionTest, ALowerOneGoesFirst) {
  store(1, Retention{10, 0s});
  store(2, Retention{80, 0s});
  store(3, Retention{60, 0s});
  flood(13);
  flood(1);
  EXPECT_FALSE(has(1)) << "before blocks that nobody has named";
  flood(100);
  EXPECT_TRUE(has(2));
  EXPECT_TRUE(has(3));
  for (std::uint64_t i = 0; i < 14; ++i) store(100 + i, Retention{90, 0s});
  EXPECT_TRUE(has(2));
  EXPECT_TRUE(has(3));
  store(200, Retention{90, 0s});
  EXPECT_TRUE(has(2));
  EXPECT_FALSE(has(3)) << "room is made at its cost when there is nothing lower";
}

TEST_P(PrefixRetentionTest, WhatABlockContinuesStaysWithIt) {
  store(1);
  store(2, {}, 1);
  store(3, Retention{80, 60s}, 2);
  flood(200);
  EXPECT_TRUE(has(1) && has(2) && has(3));
  now_ += 60s;
  flood(200);
  EXPECT_FALSE(has(1) || has(2) || has(3));
}

TEST_P(PrefixRetentionTest, OfTwoTheStrongerHolds) {
  store(1, Retention{80, 60s});
  store_again(1, {50, 600s});
  now_ += 59s;
  flood(100);
  EXPECT_TRUE(has(1));
  store_again(1, {80, 60s});
  now_ += 59s;
  flood(100);
  EXPECT_TRUE(has(1)) << "of equal priorities the later end";
  now_ += 1s;
  store_again(1, {50, 60s});
  flood(100);
  EXPECT_TRUE(has(1)) << "what is over does not count";
  now_ += 60s;
  flood(100);
  EXPECT_FALSE(has(1));
}

TEST_P(PrefixRetentionTest, ALowOneDoesNotLowerWhatIsThere) {
  store(1);
  store_again(1, {0, 0s});
  EXPECT_EQ(index_.retained(), 0U) << "others count on it";
  store_again(1, {80, 0s});
  EXPECT_EQ(index_.retained(), 1U);
  flood(100);
  EXPECT_TRUE(has(1));
}

// A retained block that is dropped leaves nothing behind for who has its place next.
TEST_P(PrefixRetentionTest, EndsWithItsBlock) {
  for (std::uint64_t i = 1; i <= 8; ++i) store(i, Retention{80, 60s});
  EXPECT_EQ(index_.drop_root(root_, [](const auto&) { return false; }), 8U);
  EXPECT_EQ(index_.retained(), 0U);
  flood(16);
  now_ += 60s;
  flood(100);
  EXPECT_EQ(index_.stats().visible, 16U);
}

INSTANTIATE_TEST_SUITE_P(Policies,
                         PrefixRetentionTest,
                         testing::ValuesIn(eviction_policies().begin(), eviction_policies().end()),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace kvferry::cache_manager
