// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/rate_budget.hpp"

#include <gtest/gtest.h>

#include <random>

namespace kvferry::cache_manager {
namespace {

using ipc::TimePoint;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr TimePoint kBegin = TimePoint{} + 1000s;
constexpr std::uint64_t kRate = 1ULL << 30;  // a second

TEST(RateBudgetTest, WithoutALimitNothingWaits) {
  RateBudget budget(0);
  budget.spend(1ULL << 50, kBegin);
  EXPECT_TRUE(budget.allows(kBegin));
  EXPECT_FALSE(budget.is_limited());
}

TEST(RateBudgetTest, WhatIsNextWaitsUntilWhatWasBegunIsPaid) {
  RateBudget budget(kRate);
  ASSERT_TRUE(budget.allows(kBegin));
  budget.spend(kRate, kBegin);
  EXPECT_FALSE(budget.allows(kBegin + 500ms));
  EXPECT_EQ(budget.next(), kBegin + 1s - RateBudget::kSaved);
  EXPECT_FALSE(budget.allows(budget.next() - 1ms));
  EXPECT_TRUE(budget.allows(budget.next()));
}

TEST(RateBudgetTest, LittleIsSavedUp) {
  RateBudget budget(kRate);
  budget.spend(1, kBegin);
  const TimePoint later = kBegin + 100s;
  ASSERT_TRUE(budget.allows(later));
  budget.spend(kRate, later);
  EXPECT_GE(budget.next(), later + 1s - RateBudget::kSaved);
}

TEST(RateBudgetTest, WhatDidNotAskKeepsOthersWaitingForAShortTimeOnly) {
  RateBudget budget(kRate);
  for (int i = 0; i < 100; ++i) budget.spend_unasked(kRate, kBegin);
  EXPECT_FALSE(budget.allows(kBegin + 10ms)) << "it counts";
  EXPECT_TRUE(budget.allows(kBegin + RateBudget::kMostOwed + 1ms));
  // Nor is what others owe forgotten for it.
  budget.spend(2 * kRate, kBegin + 1s);
  budget.spend_unasked(kRate, kBegin + 1s);
  EXPECT_FALSE(budget.allows(kBegin + 2s));
  EXPECT_TRUE(budget.allows(kBegin + 3s));
}

// Sizes and late looks of all kinds, far below and far above the limit.
TEST(RateBudgetTest, MoreThanTheRateIsNeverBegunForLong) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 50; ++round) {
    const std::uint64_t rate = 1 + (random() >> (20 + random() % 20));
    const std::uint64_t largest = 1 + rate / (1 + random() % 2000);
    RateBudget budget(rate);
    TimePoint now = kBegin;
    double begun = 0;
    for (int i = 0; i < 3000; ++i) {
      if (budget.allows(now)) {
        const std::uint64_t bytes = 1 + random() % largest;
        budget.spend(bytes, now);
        begun += static_cast<double>(bytes);
      } else {
        ASSERT_GT(budget.next(), now);
        now = budget.next();
        if (random() % 2 == 0) now += std::chrono::microseconds(random() % 3000);
      }
    }
    const double seconds = std::chrono::duration<double>(now - kBegin).count();
    const double due = static_cast<double>(rate) * seconds;
    EXPECT_LE(begun, due + static_cast<double>(largest) + 0.004 * static_cast<double>(rate) + 2);
    // Looks that come a little late cost nothing.
    EXPECT_GE(begun,
              0.999 * due - static_cast<double>(largest) - 0.004 * static_cast<double>(rate));
  }
}

}  // namespace
}  // namespace kvferry::cache_manager
