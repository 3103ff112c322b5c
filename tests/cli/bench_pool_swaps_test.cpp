// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/pool_swaps.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

namespace kvferry::cli {
namespace {

using Values = std::vector<double>;

ipc::TimePoint at_us(std::int64_t us) {
  return ipc::TimePoint(std::chrono::duration_cast<ipc::Duration>(std::chrono::microseconds(us)));
}

TimedSwap swap_of(std::int64_t tried, std::int64_t submitted, std::int64_t ended) {
  return {at_us(tried), at_us(submitted), at_us(ended), 100};
}

TEST(PoolTimesTest, TheFirstBytesEndWithTheSwapThatHasTheLastOfThem) {
  const std::vector<TimedSwap> swaps = {swap_of(500, 500, 510), swap_of(510, 510, 530),
                                        swap_of(530, 530, 535), swap_of(535, 535, 635)};
  const PoolTimes times = pool_times_of(swaps, at_us(100), 150);
  EXPECT_DOUBLE_EQ(times.first_us, 430) << "from the manager's start";
  EXPECT_EQ(times.first.values(), (Values{10, 20}));
  EXPECT_EQ(times.rest.values(), (Values{5, 100})) << "the stall is the rest's";
  EXPECT_DOUBLE_EQ(times.awaited_us, 0);
  EXPECT_DOUBLE_EQ(pool_times_of(swaps, at_us(100), 200).first_us, 430) << "all of them";
  EXPECT_DOUBLE_EQ(pool_times_of(swaps, at_us(100), 201).first_us, 435) << "and one more";
}

TEST(PoolTimesTest, APoolWithLessRoomEndsItsFirstBytesWithTheLastSwap) {
  const PoolTimes times =
      pool_times_of({swap_of(10, 10, 20), swap_of(20, 20, 40)}, at_us(0), 1'000);
  EXPECT_DOUBLE_EQ(times.first_us, 40);
  EXPECT_EQ(times.first.values(), (Values{10, 20}));
  EXPECT_TRUE(times.rest.empty());
}

TEST(PoolTimesTest, WhatARefusedSwapWaitsForRoomIsNoStall) {
  const PoolTimes times = pool_times_of(
      {swap_of(10, 10, 20), swap_of(20, 320, 330), swap_of(330, 340, 370)}, at_us(0), 200);
  EXPECT_EQ(times.first.values(), (Values{10, 10}));
  EXPECT_EQ(times.rest.values(), (Values{30}));
  EXPECT_DOUBLE_EQ(times.awaited_us, 310);
  EXPECT_DOUBLE_EQ(times.first_us, 330) << "but until the first bytes are there it counts";
}

}  // namespace
}  // namespace kvferry::cli
