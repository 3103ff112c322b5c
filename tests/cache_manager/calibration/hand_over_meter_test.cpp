// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/hand_over_meter.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using std::chrono_literals::operator""s;
using std::chrono_literals::operator""h;
using std::chrono_literals::operator""ms;

constexpr std::uint64_t kMiB = 1ULL << 20;

ipc::Duration took(const HandOverCost& real, std::uint64_t bytes) {
  const double us = real.base_us + real.us_per_mib * static_cast<double>(bytes) / (1 << 20);
  return std::chrono::nanoseconds(std::llround(us * 1000));
}

double at(const HandOverCost& cost, double mib) { return cost.base_us + mib * cost.us_per_mib; }

class HandOverMeterTest : public testing::Test {
 protected:
  void see(const HandOverCost& real, std::uint64_t bytes, int times = 1) {
    for (int i = 0; i < times; ++i) {
      now_ += 1ms;
      meter_.add(bytes, took(real, bytes), now_);
    }
  }
  HandOverMeter meter_;
  ipc::TimePoint now_{1h};
};

TEST_F(HandOverMeterTest, KnowsTheFirstEstimateBeforeItSawAny) {
  EXPECT_EQ(meter_.cost(now_), HandOverCost{});
}

TEST_F(HandOverMeterTest, FindsBaseAndSlopeOfHandOversOfSeveralSizes) {
  const HandOverCost real{60, 20};
  for (std::uint64_t i = 0; i < 200; ++i) see(real, (1 + i % 16) * 2 * kMiB);
  const HandOverCost cost = meter_.cost(now_);
  EXPECT_NEAR(cost.base_us, real.base_us, 15);
  EXPECT_NEAR(cost.us_per_mib, real.us_per_mib, 2);
}

TEST_F(HandOverMeterTest, OfOneSizeItKnowsThatSize) {
  const HandOverCost real{400, 10};
  see(real, 8 * kMiB, 60);
  EXPECT_NEAR(at(meter_.cost(now_), 8), at(real, 8), 0.1 * at(real, 8));
}

TEST_F(HandOverMeterTest, FollowsComputeThatComesAndGoes) {
  const HandOverCost idle{100, 2.5};
  const HandOverCost busy{900, 60};
  see(idle, 8 * kMiB, 50);
  see(busy, 8 * kMiB, 80);
  EXPECT_GT(at(meter_.cost(now_), 8), 0.8 * at(busy, 8));
  see(idle, 8 * kMiB, 120);
  EXPECT_LT(at(meter_.cost(now_), 8), 1.5 * at(idle, 8));
}

TEST_F(HandOverMeterTest, WhatItSawFadesSoThatStagingIsTriedAgain) {
  see({5000, 100}, 8 * kMiB, 50);
  EXPECT_GT(meter_.cost(now_).base_us, 2000);
  const HandOverCost later = meter_.cost(now_ + 300s);
  EXPECT_NEAR(later.base_us, HandOverCost{}.base_us, 10);
  EXPECT_NEAR(later.us_per_mib, HandOverCost{}.us_per_mib, 1);
}

TEST_F(HandOverMeterTest, OneThatTookLongSaysNothing) {
  const HandOverCost stall{2000, 2.5};
  see(stall, 8 * kMiB);  // the first one of a worker
  EXPECT_EQ(meter_.cost(now_), HandOverCost{});
  const HandOverCost real{80, 1};
  see(real, 8 * kMiB, 60);
  const double before = at(meter_.cost(now_), 8);
  see(stall, 8 * kMiB);
  see(real, 8 * kMiB);
  EXPECT_NEAR(at(meter_.cost(now_), 8), before, 0.01 * before);
}

TEST_F(HandOverMeterTest, TwoThatTookLongAreBelieved) {
  see({2000, 2.5}, 8 * kMiB, 2);
  EXPECT_GT(at(meter_.cost(now_), 8), 1000);
}

TEST_F(HandOverMeterTest, StallsThatLieFarApartAreNoCost) {
  for (int i = 0; i < 20; ++i) {
    see({2000, 2.5}, 8 * kMiB);
    now_ += 10s;
  }
  EXPECT_EQ(meter_.cost(now_), HandOverCost{});
}

// 12 us for each MiB of a ring of 4 slots of 8 MiB is what gathers may take.
constexpr double kMostFor8MiB = 12.0 * 32;

TEST_F(HandOverMeterTest, SlowForAMomentIsTriedAgainWithinASecond) {
  see({2000, 2.5}, 8 * kMiB, 2);
  EXPECT_GT(at(meter_.cost(now_ + 100ms), 8), kMostFor8MiB);
  EXPECT_LT(at(meter_.cost(now_ + 1s), 8), kMostFor8MiB);
  // What comes then has nothing to do with what was before.
  now_ += 1s;
  see({80, 1}, 8 * kMiB, 2);
  EXPECT_LT(at(meter_.cost(now_), 8), at(HandOverCost{}, 8));
}

TEST_F(HandOverMeterTest, StallsOfTwoAreOverInTwoSeconds) {
  see({50'000, 0}, 8 * kMiB, 3);
  EXPECT_LT(at(meter_.cost(now_ + 2s), 8), kMostFor8MiB);
}

TEST_F(HandOverMeterTest, SlowOnesNowAndThenAreLearned) {
  for (int i = 0; i < 6; ++i) {
    see({600, 2.5}, 2 * kMiB);
    now_ += 200ms;
  }
  see({600, 2.5}, 2 * kMiB);
  EXPECT_GT(at(meter_.cost(now_), 2), 1.5 * at(HandOverCost{}, 2));
}

TEST_F(HandOverMeterTest, TriesAgainLaterTheLongerItHasBeenSlow) {
  const HandOverCost slow{2000, 2.5};
  std::vector<ipc::Duration> pauses;
  for (int i = 0; i < 12; ++i) {
    see(slow, 8 * kMiB, 4);
    const ipc::TimePoint last = now_;
    while (at(meter_.cost(now_), 8) > kMostFor8MiB) now_ += 10ms;
    pauses.push_back(now_ - last);
  }
  EXPECT_TRUE(std::is_sorted(pauses.begin(), pauses.end()));
  EXPECT_LT(pauses.front(), 2s);
  EXPECT_GT(pauses.back(), 10s);
  EXPECT_LT(pauses.back(), 40s);
  // Once it is not slow any more, what is slow is tried again soon.
  see({80, 1}, 8 * kMiB, 60);
  see(slow, 8 * kMiB, 60);
  const ipc::TimePoint last = now_;
  while (at(meter_.cost(now_), 8) > kMostFor8MiB) now_ += 10ms;
  EXPECT_LT(now_ - last, 4s);
}

TEST_F(HandOverMeterTest, SlowOnesThatComeOneByOneAreBelieved) {
  const HandOverCost slow{2000, 2.5};
  for (const ipc::Duration apart : {50ms, 90ms, 110ms, 150ms, 300ms, 1000ms}) {
    HandOverMeter meter;
    int gathered = 0;
    // Gathers are made, and seen, only while they may be.
    for (ipc::TimePoint now{1h}; now < ipc::TimePoint{1h + 600s}; now += apart) {
      if (at(meter.cost(now), 8) > kMostFor8MiB) continue;
      meter.add(8 * kMiB, took(slow, 8 * kMiB), now);
      ++gathered;
    }
    EXPECT_LT(gathered, 100) << apart / 1ms << " ms apart";
  }
}

TEST_F(HandOverMeterTest, HowLongItWasSlowIsForgottenInTime) {
  for (int i = 0; i < 3; ++i) {
    see({2000, 2.5}, 8 * kMiB, 2);
    EXPECT_GT(at(meter_.cost(now_), 8), kMostFor8MiB);
    EXPECT_LT(at(meter_.cost(now_ + 1s), 8), kMostFor8MiB) << i;
    now_ += 1h;
  }
}

TEST_F(HandOverMeterTest, KeepsStagingAwayForLittleMoreThanAMinuteAtMost) {
  see({50'000, 0}, 8 * kMiB, 60'000);
  EXPECT_GT(at(meter_.cost(now_ + 60s), 8), kMostFor8MiB);
  EXPECT_LT(at(meter_.cost(now_ + 75s), 8), kMostFor8MiB);
}

TEST_F(HandOverMeterTest, LargeOnesAmongSmallOnesAreNoStrays) {
  const HandOverCost real{900, 60};
  for (int i = 0; i < 40; ++i) {
    see(real, kMiB / 2, 2);
    see(real, 32 * kMiB);
  }
  EXPECT_NEAR(at(meter_.cost(now_), 32), at(real, 32), 0.15 * at(real, 32));
  EXPECT_NEAR(at(meter_.cost(now_), 0.5), at(real, 0.5), 0.15 * at(real, 0.5));
}

TEST_F(HandOverMeterTest, StaysFiniteAndPositiveWhateverItSees) {
  for (int i = 0; i < 1000; ++i) {
    now_ += std::chrono::milliseconds(i % 7 == 0 ? 0 : 1 << (i % 20));
    const std::uint64_t bytes = i % 5 == 0 ? 0 : 1ULL << (i % 40);
    meter_.add(bytes, i % 3 == 0 ? ipc::Duration(-1s) : ipc::Duration(i * 1h), now_);
    const HandOverCost cost = meter_.cost(now_ - ipc::Duration(i * 1ms));
    ASSERT_TRUE(std::isfinite(cost.base_us) && std::isfinite(cost.us_per_mib)) << i;
    ASSERT_GE(cost.base_us, 0);
    ASSERT_GE(cost.us_per_mib, 0);
  }
}

}  // namespace
}  // namespace kvferry::cache_manager
