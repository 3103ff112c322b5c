// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/store_gate.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvferry::worker {
namespace {

using std::chrono_literals::operator""ms;

constexpr ipc::TimePoint kStart{std::chrono::hours(1)};

TEST(StoreGateTest, WithoutABoundEverythingPasses) {
  StoreGate gate;
  gate.begin(1'000'000);
  EXPECT_EQ(gate.admit(500, kStart), 500U);
  EXPECT_EQ(gate.counts().dropped_queue, 0U);
}

TEST(StoreGateTest, BeyondTheBoundBlocksAreDroppedAndCounted) {
  StoreGate gate({.most_blocks = 10});
  EXPECT_EQ(gate.admit(8, kStart), 8U);
  gate.begin(8);
  EXPECT_EQ(gate.admit(5, kStart), 2U);
  EXPECT_EQ(gate.counts().dropped_queue, 3U);
  gate.begin(2);
  EXPECT_FALSE(gate.is_open(kStart));
  EXPECT_EQ(gate.admit(4, kStart), 0U);
  EXPECT_EQ(gate.counts().dropped_queue, 7U);
  gate.end(8);
  EXPECT_TRUE(gate.is_open(kStart));
  EXPECT_EQ(gate.admit(8, kStart), 8U);
  EXPECT_EQ(gate.counts().dropped_room, 0U);
}

TEST(StoreGateTest, ABoundThatIsLoweredUnderWhatIsUnderWayLetsNothingThrough) {
  StoreGate gate({.most_blocks = 10});
  gate.begin(10);
  gate.set_most_blocks(4);
  EXPECT_EQ(gate.admit(1, kStart), 0U);
  gate.end(7);
  EXPECT_EQ(gate.admit(3, kStart), 1U);
}

TEST(StoreGateTest, AfterHostMemoryWasFullNothingIsAskedForUntilThePauseIsOver) {
  StoreGate gate({.most_blocks = 10, .full_pause = 20ms});
  gate.on_full(3, kStart);
  EXPECT_EQ(gate.counts().dropped_room, 3U);
  EXPECT_FALSE(gate.is_open(kStart + 19ms));
  EXPECT_EQ(gate.admit(4, kStart + 19ms), 0U);
  EXPECT_EQ(gate.counts().dropped_room, 7U);
  EXPECT_EQ(gate.counts().dropped_queue, 0U);
  EXPECT_EQ(gate.admit(4, kStart + 20ms), 4U);
}

TEST(StoreGateTest, AnAnswerThatHadRoomForAllClosesNothing) {
  StoreGate gate;
  gate.on_full(0, kStart);
  EXPECT_TRUE(gate.is_open(kStart));
}

TEST(StoreGateTest, NeverIsMoreUnderWayThanTheBoundAndEveryBlockPassesOrIsCounted) {
  std::mt19937_64 random(3);
  StoreGate gate({.most_blocks = 37});
  std::vector<std::size_t> jobs;
  std::uint64_t asked = 0;
  std::uint64_t passed = 0;
  for (int i = 0; i < 5000; ++i) {
    if (!jobs.empty() && random() % 2 == 0) {
      gate.end(jobs.back());
      jobs.pop_back();
      continue;
    }
    const std::size_t blocks = random() % 20;
    asked += blocks;
    const std::size_t admitted = gate.admit(blocks, kStart);
    passed += admitted;
    gate.begin(admitted);
    jobs.push_back(admitted);
    ASSERT_LE(gate.under_way(), 37U);
  }
  EXPECT_EQ(asked, passed + gate.counts().dropped_queue);
  EXPECT_GT(gate.counts().dropped_queue, 0U);
}

TEST(StoreGateTest, AfterAFailedStoreItIsClosedForAWhile) {
  StoreGate gate({.full_pause = std::chrono::milliseconds(20)});
  gate.begin(3);
  gate.end(3);
  gate.on_failed(kStart);
  EXPECT_FALSE(gate.is_open(kStart + std::chrono::milliseconds(19)));
  EXPECT_EQ(gate.admit(2, kStart), 0U);
  EXPECT_EQ(gate.counts().dropped_room, 2U);
  EXPECT_TRUE(gate.is_open(kStart + std::chrono::milliseconds(20)));
}

}  // namespace
}  // namespace kvferry::worker
