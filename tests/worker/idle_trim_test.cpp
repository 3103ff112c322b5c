// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "idle_trim.hpp"

#include "support/child_process.hpp"

#include <gtest/gtest.h>

namespace kvferry::worker {
namespace {

using std::chrono_literals::operator""ms;

class IdleTrimTest : public testing::Test {
 protected:
  /// Until a timer that is set now, for many times the trim's time.
  void run_long() {
    bool over = false;
    loop_.after(40ms, [&over] { over = true; });
    run_until([&over] { return over; });
  }
  template <typename Condition> void run_until(Condition condition) {
    const ipc::Deadline deadline = test::soon();
    while (!condition() && !deadline.expired()) loop_.run_once(deadline);
    ASSERT_TRUE(condition());
  }

  ipc::EventLoop loop_;
  int trims_ = 0;
};

TEST_F(IdleTrimTest, ComesOnceAfterTheStartAndOnceAfterEachTimeOfWork) {
  IdleTrim idle(loop_, 1ms, [this] { ++trims_; });
  run_until([this] { return trims_ == 1; });
  run_long();
  EXPECT_EQ(trims_, 1);
  idle.on_busy();
  idle.on_idle();
  run_until([this] { return trims_ == 2; });
  run_long();
  EXPECT_EQ(trims_, 2);
}

TEST_F(IdleTrimTest, DoesNotComeWhileAStepRuns) {
  IdleTrim idle(loop_, 1ms, [this] { ++trims_; });
  idle.on_busy();
  run_long();
  EXPECT_EQ(trims_, 0);
  idle.on_idle();
  run_until([this] { return trims_ == 1; });
}

TEST_F(IdleTrimTest, NeverComesWithoutATime) {
  IdleTrim idle(loop_, 0ms, [this] { ++trims_; });
  idle.on_busy();
  idle.on_idle();
  run_long();
  EXPECT_EQ(trims_, 0);
}

}  // namespace
}  // namespace kvferry::worker
