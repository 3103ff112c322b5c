// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/offload_watch.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class OffloadWatchTest : public testing::Test {
 protected:
  ipc::Status at(ipc::Duration time, bool offload_ready) {
    sight_.offload_ready = offload_ready;
    return watch_.update(sight_, ipc::TimePoint{} + time);
  }

  std::vector<std::string> lines_;
  OffloadWatch::Sight sight_{.playing = true, .cache_ready = true};
  OffloadWatch watch_{{.start_limit = 60s, .patience = 30s},
                      {.say = [this](const std::string& line) { lines_.push_back(line); },
                       .reasons = [] { return std::string("mover/0: broken"); }}};
};

TEST_F(OffloadWatchTest, ALossAndItsEndAreSaidWithTheReasonAndCounted) {
  EXPECT_TRUE(at(1s, true));
  EXPECT_TRUE(at(10s, false));
  EXPECT_THAT(lines_, IsEmpty());
  EXPECT_TRUE(at(12s, false));
  EXPECT_TRUE(at(13s, false));
  ASSERT_THAT(lines_, ElementsAre(HasSubstr("mover/0: broken")));
  EXPECT_TRUE(at(14500ms, true));
  ASSERT_EQ(lines_.size(), 2U);
  EXPECT_EQ(lines_[1], "offload is ready again after 4.5 s");
  EXPECT_DOUBLE_EQ(watch_.down_s(), 4.5);
}

TEST_F(OffloadWatchTest, AShortLossIsCountedAndNotSaid) {
  EXPECT_TRUE(at(1s, false));
  EXPECT_TRUE(at(1500ms, true));
  EXPECT_THAT(lines_, IsEmpty());
  EXPECT_DOUBLE_EQ(watch_.down_s(), 0.5);
}

TEST_F(OffloadWatchTest, TheTimeOfAClearIsNoLoss) {
  sight_.cache_ready = false;
  EXPECT_TRUE(at(1s, false));
  EXPECT_TRUE(at(100s, false));
  EXPECT_THAT(lines_, IsEmpty());
  EXPECT_DOUBLE_EQ(watch_.down_s(), 0);
}

TEST_F(OffloadWatchTest, ALongLossWithoutADeathEndsTheRun) {
  EXPECT_TRUE(at(1s, false));
  EXPECT_TRUE(at(31s, false));
  const ipc::Status ended = at(32s, false);
  ASSERT_FALSE(ended);
  EXPECT_THAT(ended.error().message, HasSubstr("mover/0: broken"));
}

TEST_F(OffloadWatchTest, ADeathDuringALossStartsThePatienceAnew) {
  EXPECT_TRUE(at(1s, false));
  ++sight_.deaths;
  EXPECT_TRUE(at(25s, false));
  EXPECT_TRUE(at(55s, false));
  EXPECT_FALSE(at(56s, false));
}

TEST_F(OffloadWatchTest, AStartThatNeverComesIsSaidAndEndsTheRun) {
  sight_.playing = false;
  EXPECT_TRUE(at(0s, false));
  EXPECT_TRUE(at(5s, false));
  EXPECT_THAT(lines_, IsEmpty());
  EXPECT_TRUE(at(6s, false));
  EXPECT_TRUE(at(20s, false));
  EXPECT_THAT(lines_, ElementsAre("waiting since 6 s for offload: mover/0: broken"));
  EXPECT_TRUE(at(22s, false));
  EXPECT_EQ(lines_.size(), 2U);
  const ipc::Status ended = at(61s, false);
  ASSERT_FALSE(ended);
  EXPECT_THAT(ended.error().message, HasSubstr("60 s: mover/0: broken"));
}

}  // namespace
}  // namespace kvferry::cli
