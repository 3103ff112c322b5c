// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/load_choice.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace kvferry::worker {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::TimePoint kStart{std::chrono::hours(1)};
constexpr std::uint64_t kMiB = 1U << 20;

/// What a choice takes: its loads, then the compute of the rest of the prefix.
double seconds_of(const std::vector<std::uint64_t>& bytes,
                  const LoadCosts& costs,
                  std::size_t used) {
  double loaded = 0;
  for (std::size_t i = 0; i < used; ++i) loaded += static_cast<double>(bytes[i]);
  const double load =
      loaded > 0 ? costs.fixed_seconds + (costs.ahead_bytes + loaded) / costs.bytes_per_second : 0;
  return load + static_cast<double>(bytes.size() - used) * costs.tokens_per_block /
                    costs.tokens_per_second;
}

std::size_t leading_zeros(const std::vector<std::uint64_t>& bytes) {
  std::size_t zeros = 0;
  while (zeros < bytes.size() && bytes[zeros] == 0) ++zeros;
  return zeros;
}

std::vector<std::uint64_t> random_prefix(std::mt19937_64& random) {
  std::vector<std::uint64_t> bytes(random() % 30);
  for (std::uint64_t& size : bytes) size = random() % 3 == 0 ? 0 : random() % (4 * kMiB) + 1;
  return bytes;
}

LoadCosts random_costs(std::mt19937_64& random) {
  LoadCosts costs;
  costs.bytes_per_second = std::exp2(20 + static_cast<double>(random() % 1600) / 100);
  costs.tokens_per_second = std::exp2(8 + static_cast<double>(random() % 1200) / 100);
  costs.fixed_seconds = static_cast<double>(random() % 1000) / 1e5;
  costs.ahead_bytes = static_cast<double>(random() % (64 * kMiB));
  costs.tokens_per_block = 16;
  return costs;
}

/// Decides and does so.
std::uint32_t choose(LoadChoice& choice,
                     const std::vector<std::uint64_t>& bytes,
                     ipc::TimePoint now) {
  const LoadChoice::Decision decision = choice.choose(bytes, 16, 0, now);
  EXPECT_EQ(decision.length, bytes.size());
  choice.on_done(decision, now);
  return decision.used;
}

TEST(LoadChoiceTest, WhileARateIsUnknownAllIsLoaded) {
  const std::vector<std::uint64_t> bytes(10, kMiB);
  EXPECT_EQ(choose_prefix(bytes, {.bytes_per_second = 1, .tokens_per_second = 0}), 10U);
  EXPECT_EQ(choose_prefix(bytes, {.bytes_per_second = 0, .tokens_per_second = 1}), 10U);
  EXPECT_EQ(choose_prefix(bytes, {.bytes_per_second = std::nan(""), .tokens_per_second = 1}), 10U);
}

TEST(LoadChoiceTest, ATinyPrefixIsNotWorthTheFixedCostAndALongOneIs) {
  LoadCosts costs;
  costs.bytes_per_second = 1e9;
  costs.tokens_per_second = 1e5;
  costs.fixed_seconds = 1e-3;
  costs.tokens_per_block = 64;  // 640 us to compute a block, 105 us to load it after 1 ms.
  EXPECT_EQ(choose_prefix(std::vector<std::uint64_t>(1, 100'000), costs), 0U);
  EXPECT_EQ(choose_prefix(std::vector<std::uint64_t>(2, 100'000), costs), 2U);
}

TEST(LoadChoiceTest, ItLoadsOnlyAsFarAsABlockIsWorthIt) {
  LoadCosts costs;
  costs.bytes_per_second = 1e9;
  costs.tokens_per_second = 1000;
  costs.tokens_per_block = 1;  // 1 ms for each block, as for a megabyte.
  EXPECT_EQ(choose_prefix(std::vector<std::uint64_t>{500'000, 500'000, 9'000'000, 500'000}, costs),
            2U);
  // What is on the device behind it makes the large one worth it.
  EXPECT_EQ(choose_prefix(std::vector<std::uint64_t>{500'000, 2'000'000, 0, 0, 0}, costs), 5U);
}

TEST(LoadChoiceTest, BlocksOnTheDeviceAtTheBeginningAreAlwaysUsed) {
  LoadCosts costs;
  costs.bytes_per_second = 1;
  costs.tokens_per_second = 1e12;
  EXPECT_EQ(choose_prefix(std::vector<std::uint64_t>{0, 0, kMiB, 0}, costs), 2U);
  EXPECT_EQ(choose_prefix(std::vector<std::uint64_t>{0, 0}, costs), 2U);
  EXPECT_EQ(choose_prefix(std::vector<std::uint64_t>{}, costs), 0U);
}

TEST(LoadChoiceTest, LoadsOfOthersThatGoFirstCountAgainstALoad) {
  LoadCosts costs;
  costs.bytes_per_second = 1e9;
  costs.tokens_per_second = 1000;
  const std::vector<std::uint64_t> bytes(10, 100'000);
  EXPECT_EQ(choose_prefix(bytes, costs), 10U);
  costs.ahead_bytes = 1e9;
  EXPECT_EQ(choose_prefix(bytes, costs), 0U);
}

TEST(LoadChoiceTest, NoOtherChoiceIsFasterAndNoneThatIsAsFastLoadsLess) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 3000; ++i) {
    const std::vector<std::uint64_t> bytes = random_prefix(random);
    const LoadCosts costs = random_costs(random);
    const std::size_t used = choose_prefix(bytes, costs);
    const double taken = seconds_of(bytes, costs, used);
    for (std::size_t other = leading_zeros(bytes); other <= bytes.size(); ++other) {
      ASSERT_LE(taken, seconds_of(bytes, costs, other) + 1e-9)
          << i << ": " << used << ", " << other;
    }
    ASSERT_GE(used, leading_zeros(bytes));
  }
}

TEST(LoadChoiceTest, ItNeverLoadsWhenComputingAllIsFaster) {
  std::mt19937_64 random(6);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    const std::vector<std::uint64_t> bytes = random_prefix(random);
    const LoadCosts costs = random_costs(random);
    const std::size_t free = leading_zeros(bytes);
    const std::size_t used = choose_prefix(bytes, costs);
    if (used == free) {
      ++refused;
      continue;
    }
    ASSERT_LT(seconds_of(bytes, costs, used), seconds_of(bytes, costs, free)) << i;
  }
  EXPECT_GT(refused, 300);
  EXPECT_LT(refused, 2700);
}

TEST(LoadChoiceTest, WithMoreBandwidthItNeverUsesLess) {
  std::mt19937_64 random(7);
  int grew = 0;
  for (int i = 0; i < 500; ++i) {
    const std::vector<std::uint64_t> bytes = random_prefix(random);
    LoadCosts costs = random_costs(random);
    costs.bytes_per_second = 1e5;
    std::uint32_t before = 0;
    for (; costs.bytes_per_second < 1e13; costs.bytes_per_second *= 1.3) {
      const std::uint32_t used = choose_prefix(bytes, costs);
      ASSERT_GE(used, before) << i << " at " << costs.bytes_per_second;
      if (before > 0 && used > before) ++grew;
      before = used;
    }
  }
  EXPECT_GT(grew, 100);
}

TEST(LoadChoiceTest, WithFasterComputeItNeverUsesMore) {
  std::mt19937_64 random(8);
  for (int i = 0; i < 500; ++i) {
    const std::vector<std::uint64_t> bytes = random_prefix(random);
    LoadCosts costs = random_costs(random);
    costs.tokens_per_second = 10;
    auto before = static_cast<std::uint32_t>(bytes.size());
    for (; costs.tokens_per_second < 1e9; costs.tokens_per_second *= 1.3) {
      const std::uint32_t used = choose_prefix(bytes, costs);
      ASSERT_LE(used, before) << i << " at " << costs.tokens_per_second;
      before = used;
    }
  }
}

TEST(LoadChoiceTest, ModesLoadAllOrNothingWhateverIsMeasured) {
  const std::vector<std::uint64_t> bytes = {0, kMiB, kMiB};
  LoadChoice never;
  LoadChoice always({.mode = RecomputeMode::kAlways});
  for (LoadChoice* choice : {&never, &always}) {
    choice->on_loaded(kMiB, kStart, kStart + 1s);
    choice->on_computed(1'000'000, kStart, kStart + 1ms);
  }
  EXPECT_EQ(choose(never, bytes, kStart + 1s), 3U);
  EXPECT_EQ(choose(always, bytes, kStart + 1s), 1U);
  EXPECT_EQ(never.counts().refused, 0U);
  EXPECT_EQ(always.counts().refused, 1U);
  EXPECT_EQ(always.counts().blocks, 2U);
}

TEST(LoadChoiceTest, EveryModeIsReadBackAndOthersAreRefused) {
  for (const auto mode : {RecomputeMode::kNever, RecomputeMode::kAuto, RecomputeMode::kAlways}) {
    const auto parsed = parse_recompute_mode(to_string(mode));
    ASSERT_TRUE(parsed);
    EXPECT_EQ(*parsed, mode);
  }
  EXPECT_FALSE(parse_recompute_mode("sometimes"));
}

TEST(LoadChoiceTest, AutoFollowsWhatLoadsAndComputeTake) {
  LoadChoice choice({.mode = RecomputeMode::kAuto, .fixed = 0s});
  const std::vector<std::uint64_t> bytes(8, kMiB);
  EXPECT_EQ(choose(choice, bytes, kStart), 8U);        // Nothing is known yet.
  choice.on_computed(1600, kStart, kStart + 1s);       // 10 ms a block.
  choice.on_loaded(64 * kMiB, kStart, kStart + 64ms);  // 1 ms a block.
  EXPECT_EQ(choose(choice, bytes, kStart + 100ms), 8U);
  // The link gets slow: 100 ms a block, for most of what counts.
  for (int i = 0; i < 10; ++i) {
    choice.on_loaded(64 * kMiB, kStart + (100ms + 6400ms * i), kStart + (100ms + 6400ms * (i + 1)));
  }
  EXPECT_EQ(choose(choice, bytes, kStart + 65s), 0U);
  EXPECT_EQ(choice.counts().requests, 3U);
  EXPECT_EQ(choice.counts().refused, 1U);
  EXPECT_EQ(choice.counts().blocks, 8U);
}

TEST(LoadChoiceTest, ARateThatTheEngineGivesStandsForWhatWouldBeMeasured) {
  LoadChoice choice({.mode = RecomputeMode::kAuto, .tokens_per_second = 1e9});
  choice.on_computed(1, kStart, kStart + 100s);
  choice.on_loaded(kMiB, kStart, kStart + 1s);
  EXPECT_EQ(choice.tokens_per_second(), 1e9);
  EXPECT_EQ(choose(choice, std::vector<std::uint64_t>(4, kMiB), kStart + 1s), 0U);
}

TEST(LoadChoiceTest, RefusalsDoNotOutliveTheirMeasurementForEver) {
  LoadChoice choice({.mode = RecomputeMode::kAuto, .tokens_per_second = 1e9, .probe_after = 10s});
  choice.on_loaded(kMiB, kStart, kStart + 1s);
  const std::vector<std::uint64_t> bytes(4, kMiB);
  EXPECT_EQ(choose(choice, bytes, kStart + 10s), 0U);
  EXPECT_EQ(choose(choice, bytes, kStart + 11s), 4U);  // A probe ...
  EXPECT_EQ(choose(choice, bytes, kStart + 12s), 0U);  // ... and only one.
  EXPECT_EQ(choice.counts().probes, 1U);
  EXPECT_EQ(choice.counts().refused, 2U);
}

TEST(LoadChoiceTest, AfterAStallOneSmallProbeIsEnoughToLoadAgain) {
  LoadChoice choice({.mode = RecomputeMode::kAuto, .fixed = 0s, .probe_after = 10s});
  choice.on_computed(1600, kStart, kStart + 1s);  // 10 ms a block.
  choice.on_loaded(16 * kMiB, kStart, kStart + 5s);
  const std::vector<std::uint64_t> bytes(2, kMiB / 16);
  ASSERT_EQ(choose(choice, bytes, kStart + 6s), 0U);
  const ipc::TimePoint probed = kStart + 15s;
  ASSERT_EQ(choose(choice, bytes, probed), 2U);
  // A load of before that ends late says what was known; the probe says what is.
  choice.on_loaded(kMiB / 8, kStart + 4s, probed + 10ms);
  EXPECT_EQ(choose(choice, bytes, probed + 10ms), 0U);
  choice.on_loaded(kMiB / 8, probed, probed + 11ms);
  EXPECT_EQ(choose(choice, bytes, probed + 12ms), 2U);
}

TEST(LoadChoiceTest, AProbeThatMovedNothingLeavesTheNextOneToTell) {
  LoadChoice choice({.mode = RecomputeMode::kAuto, .fixed = 0s, .probe_after = 10s});
  choice.on_computed(1600, kStart, kStart + 1s);
  choice.on_loaded(16 * kMiB, kStart, kStart + 5s);
  const std::vector<std::uint64_t> bytes(2, kMiB / 16);
  ASSERT_EQ(choose(choice, bytes, kStart + 15s), 2U);
  choice.on_loaded(0, kStart + 15s, kStart + 16s);
  ASSERT_EQ(choose(choice, bytes, kStart + 17s), 0U);
  ASSERT_EQ(choose(choice, bytes, kStart + 26s), 2U);
  choice.on_loaded(kMiB / 8, kStart + 26s, kStart + 26001ms);
  EXPECT_EQ(choose(choice, bytes, kStart + 27s), 2U);
}

TEST(LoadChoiceTest, WhatALoadOfAnySizeTakesIsNoPartOfTheRate) {
  LoadChoice choice({.mode = RecomputeMode::kAuto, .fixed = 1ms});
  choice.on_loaded(kMiB, kStart, kStart + 2ms);
  EXPECT_DOUBLE_EQ(choice.bytes_per_second(), kMiB * 1000.0);
  // Of one that took no longer than that, half the time is left.
  LoadChoice quick({.mode = RecomputeMode::kAuto, .fixed = 1ms});
  quick.on_loaded(kMiB, kStart, kStart + 1ms);
  EXPECT_DOUBLE_EQ(quick.bytes_per_second(), kMiB * 2000.0);
}

TEST(LoadChoiceTest, FewerHostBlocksThanTheLeastAreNotLoaded) {
  LoadChoice choice(
      {.mode = RecomputeMode::kAuto, .tokens_per_second = 1, .fixed = 0s, .least_blocks = 3});
  choice.on_loaded(kMiB, kStart, kStart + 1ms);
  EXPECT_EQ(choose(choice, std::vector<std::uint64_t>{0, kMiB, kMiB}, kStart), 1U);
  EXPECT_EQ(choose(choice, std::vector<std::uint64_t>{0, kMiB, kMiB, kMiB}, kStart), 4U);
}

TEST(LoadChoiceTest, AShortenedLoadIsCounted) {
  LoadChoice choice({.mode = RecomputeMode::kAuto, .tokens_per_second = 16'000, .fixed = 0s});
  choice.on_loaded(kMiB, kStart, kStart + 1ms);  // A block of 1 MiB takes 1 ms, as computing does.
  EXPECT_EQ(choose(choice, std::vector<std::uint64_t>{kMiB / 2, 4 * kMiB}, kStart), 1U);
  EXPECT_EQ(choice.counts().shortened, 1U);
  EXPECT_EQ(choice.counts().blocks, 1U);
}

TEST(MovingRateTest, NothingIsKnownBeforeTheFirstPiece) {
  MovingRate rate(1000);
  EXPECT_FALSE(rate.per_second());
  rate.observe(0, kStart, kStart + 1s);
  EXPECT_FALSE(rate.per_second());
  rate.observe(10, kStart + 1s, kStart + 3s);
  ASSERT_TRUE(rate.per_second());
  EXPECT_DOUBLE_EQ(*rate.per_second(), 5);
}

TEST(MovingRateTest, PiecesThatOverlapShareTheirTime) {
  MovingRate rate(1e9);
  rate.observe(100, kStart, kStart + 1s);
  rate.observe(100, kStart, kStart + 2s);  // The first second was the other's.
  ASSERT_TRUE(rate.per_second());
  EXPECT_NEAR(*rate.per_second(), 100, 1e-3);
  rate.observe(100, kStart + 10s, kStart + 11s);  // Idle time is nobody's.
  EXPECT_NEAR(*rate.per_second(), 100, 1e-3);
}

TEST(MovingRateTest, OldPiecesCountForLessByTheTimeToo) {
  MovingRate rate(1e12, 10s);
  rate.observe(100, kStart, kStart + 10s);
  rate.observe(100, kStart + 19s, kStart + 20s);  // Ten seconds later.
  ASSERT_TRUE(rate.per_second());
  EXPECT_NEAR(*rate.per_second(), (50 + 100) / (5.0 + 1), 1e-6);
}

TEST(MovingRateTest, WhatIsForgottenDoesNotCount) {
  MovingRate rate(1e12);
  rate.observe(100, kStart, kStart + 10s);
  rate.forget();
  EXPECT_FALSE(rate.per_second());
  EXPECT_EQ(rate.seen(), kStart + 10s);
  rate.observe(100, kStart + 10s, kStart + 11s);
  ASSERT_TRUE(rate.per_second());
  EXPECT_DOUBLE_EQ(*rate.per_second(), 100);
}

TEST(MovingRateTest, NewPiecesCountForMoreByTheHalfLife) {
  MovingRate rate(100);
  rate.observe(100, kStart, kStart + 1s);
  rate.observe(100, kStart + 1s, kStart + 11s);
  ASSERT_TRUE(rate.per_second());
  EXPECT_NEAR(*rate.per_second(), (50 + 100) / (0.5 + 10), 1e-9);
  for (int i = 0; i < 20; ++i) rate.observe(100, kStart + 11s + 1s * i, kStart + 12s + 1s * i);
  EXPECT_NEAR(*rate.per_second(), 100, 0.01);
}

}  // namespace
}  // namespace kvferry::worker
