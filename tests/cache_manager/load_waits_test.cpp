// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/load_waits.hpp"

#include <gtest/gtest.h>

#include <optional>

namespace kvferry::cache_manager {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

class LoadWaitsTest : public testing::Test {
 protected:
  /// Turns of both lengths, loads being under way all the time, as jobs of 5 ms tell of it.
  void turns(int count, ipc::Duration computing, ipc::Duration waiting) {
    for (int i = 0; i < count; ++i) {
      pass(computing, true, true);
      pass(waiting, true, false);
    }
  }
  void pass(ipc::Duration time, bool loading, std::optional<bool> computing) {
    for (const ipc::TimePoint end = now_ + time; now_ < end; now_ += 5ms) {
      waits_.note(now_, loading, computing);
    }
  }

  ipc::TimePoint now_{1s};
  LoadWaits waits_;
};

TEST_F(LoadWaitsTest, ComputeThatNeverStopsWaitsForNothing) {
  EXPECT_FALSE(waits_.are_waited_for());
  pass(2s, true, true);
  EXPECT_FALSE(waits_.are_waited_for());
}

TEST_F(LoadWaitsTest, ComputeThatStandsStillForMuchOfALoadWaitsForIt) {
  turns(10, 40ms, 40ms);
  EXPECT_TRUE(waits_.are_waited_for());
  pass(40ms, true, true);
  EXPECT_TRUE(waits_.are_waited_for()) << "while it computes, too";
}

TEST_F(LoadWaitsTest, ASmallPartIsNoWait) {
  turns(10, 190ms, 10ms);
  EXPECT_FALSE(waits_.are_waited_for());
}

TEST_F(LoadWaitsTest, ItIsForgottenOnceLoadsAreHidden) {
  turns(10, 40ms, 40ms);
  pass(4s, true, true);
  EXPECT_FALSE(waits_.are_waited_for());
}

TEST_F(LoadWaitsTest, GatheringThatShortensTheWaitsIsNotGivenUpForThat) {
  turns(10, 80ms, 15ms);
  ASSERT_TRUE(waits_.are_waited_for());
  turns(40, 80ms, 10ms);
  EXPECT_TRUE(waits_.are_waited_for());
}

TEST_F(LoadWaitsTest, WhatStandsStillWhileNothingIsLoadedSaysNothing) {
  pass(200ms, true, true);
  pass(10s, false, false);
  EXPECT_FALSE(waits_.are_waited_for());
  pass(200ms, true, true);
  EXPECT_FALSE(waits_.are_waited_for());
}

TEST_F(LoadWaitsTest, NothingIsSaidOfAWorkerThatDoesNotTell) {
  pass(5s, true, std::nullopt);
  EXPECT_FALSE(waits_.are_waited_for());
}

}  // namespace
}  // namespace kvferry::cache_manager
