// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/write_policy.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace kvferry::worker {
namespace {

using ipc::Digest;
using ipc::GroupId;

constexpr GroupId kMain{0};
constexpr GroupId kDraft{1};

Digest block(std::uint64_t value) { return Digest::from_words(7, value); }

WritePolicy selective(std::uint32_t uses, std::size_t remembered = 1000) {
  return WritePolicy({.mode = WriteMode::kSelective, .uses = uses, .remembered = remembered});
}

TEST(WritePolicyTest, EveryNameIsReadBackAndOthersAreRefusedWithAllNames) {
  for (const WriteMode mode : kWriteModes) {
    const auto parsed = parse_write_mode(to_string(mode));
    ASSERT_TRUE(parsed) << to_string(mode);
    EXPECT_EQ(*parsed, mode);
  }
  const auto refused = parse_write_mode("write-around");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ipc::ErrorCode::kInvalidArgument);
  for (const WriteMode mode : kWriteModes) {
    EXPECT_NE(refused.error().message.find(to_string(mode)), std::string::npos);
  }
}

TEST(WritePolicyTest, WriteThroughStoresWhatIsFilledAndWhatAnEarlierStoreLeft) {
  WritePolicy policy;
  EXPECT_EQ(policy.mode(), WriteMode::kWriteThrough);
  EXPECT_TRUE(policy.on_filled(kMain, block(1)));
  EXPECT_TRUE(policy.on_hit(kMain, block(1)));
  EXPECT_FALSE(policy.on_evicting(kMain, block(1)));
  EXPECT_EQ(policy.remembered(), 0U);
}

TEST(WritePolicyTest, WriteBackStoresOnlyWhatIsEvicted) {
  WritePolicy policy({.mode = WriteMode::kWriteBack});
  EXPECT_FALSE(policy.on_filled(kMain, block(1)));
  EXPECT_FALSE(policy.on_hit(kMain, block(1)));
  EXPECT_TRUE(policy.on_evicting(kMain, block(1)));
}

TEST(WritePolicyTest, SelectiveStoresAtTheUseThatReachesTheNumberAndAtLaterOnes) {
  WritePolicy policy = selective(3);
  EXPECT_FALSE(policy.on_filled(kMain, block(1)));
  EXPECT_FALSE(policy.on_hit(kMain, block(1)));
  EXPECT_FALSE(policy.on_hit(kMain, block(2)));
  EXPECT_TRUE(policy.on_hit(kMain, block(1)));
  EXPECT_TRUE(policy.on_hit(kMain, block(1)));
  EXPECT_FALSE(policy.on_evicting(kMain, block(1)));
}

TEST(WritePolicyTest, SelectiveCountsABlockThatIsFilledAgainAfterItsEviction) {
  WritePolicy policy = selective(2);
  EXPECT_FALSE(policy.on_filled(kMain, block(1)));
  EXPECT_TRUE(policy.on_filled(kMain, block(1)));
}

TEST(WritePolicyTest, SelectiveCountsGroupsApart) {
  WritePolicy policy = selective(2);
  EXPECT_FALSE(policy.on_filled(kMain, block(1)));
  EXPECT_FALSE(policy.on_filled(kDraft, block(1)));
  EXPECT_TRUE(policy.on_hit(kDraft, block(1)));
}

TEST(WritePolicyTest, OneUseIsEnoughWhenOneOrNoneIsAskedFor) {
  EXPECT_TRUE(selective(1).on_filled(kMain, block(1)));
  EXPECT_TRUE(selective(0).on_filled(kMain, block(1)));
}

TEST(WritePolicyTest, ForgettingStartsTheCountAnew) {
  WritePolicy policy = selective(2);
  EXPECT_FALSE(policy.on_filled(kMain, block(1)));
  policy.forget();
  EXPECT_EQ(policy.remembered(), 0U);
  EXPECT_FALSE(policy.on_filled(kMain, block(1)));
}

TEST(WritePolicyTest, WhatIsRememberedHasABoundAndRecentUsesAreKept) {
  constexpr std::size_t kRemembered = 50;
  WritePolicy policy = selective(1000, kRemembered);
  for (std::uint64_t i = 0; i < 10'000; ++i) {
    EXPECT_FALSE(policy.on_filled(kMain, block(i)));
    ASSERT_LE(policy.remembered(), 2 * kRemembered);
  }
  WritePolicy twice = selective(2, kRemembered);
  EXPECT_FALSE(twice.on_filled(kMain, block(1'000'000)));
  for (std::uint64_t i = 0; i < kRemembered - 1; ++i) (void)twice.on_filled(kMain, block(i));
  EXPECT_TRUE(twice.on_filled(kMain, block(1'000'000)));
}

// Against a plain count, for as many blocks as are remembered.
TEST(WritePolicyTest, SelectiveAgreesWithACountOfAllUses) {
  std::mt19937_64 random(11);
  for (std::uint32_t uses = 1; uses <= 4; ++uses) {
    WritePolicy policy = selective(uses, 64);
    std::map<std::uint64_t, std::uint32_t> counts;
    for (int i = 0; i < 2000; ++i) {
      const std::uint64_t which = random() % 64;
      const bool filled = random() % 2 == 0;
      const bool stores =
          filled ? policy.on_filled(kMain, block(which)) : policy.on_hit(kMain, block(which));
      ASSERT_EQ(stores, ++counts[which] >= uses) << "use " << i << " of block " << which;
    }
  }
}

}  // namespace
}  // namespace kvferry::worker
