// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/rank/compute_activity.hpp"

#include <gtest/gtest.h>

namespace kvferry::ipc {
namespace {

TEST(ComputeActivityTest, TellsNothingBeforeAnythingRanThenThatItDoesAndDidLately) {
  ComputeActivity activity;
  const ComputeActivityView view = ComputeActivityView::map(activity.fd()).value();
  EXPECT_EQ(view.is_computing(MonotonicClock::now()), std::nullopt);
  activity.begin();
  activity.begin();
  EXPECT_EQ(view.is_computing(MonotonicClock::now()), true);
  activity.end();
  EXPECT_EQ(view.is_computing(MonotonicClock::now() + std::chrono::hours(1)), true);
  activity.end();
  const TimePoint ended = MonotonicClock::now();
  EXPECT_EQ(view.is_computing(ended - std::chrono::seconds(1)), true);
  EXPECT_EQ(view.is_computing(ended + 2 * ComputeActivityView::kLately), false);
}

/// Steps of so much compute, each followed by a gap; returns when the last gap began.
TimePoint compute_steps(ComputeActivity& activity, Duration step, Duration gap) {
  TimePoint now = MonotonicClock::now();
  for (int i = 0; i < 100; ++i) {
    now += gap;
    activity.begin(now);
    now += step;
    activity.end(now);
  }
  return now;
}

TEST(ComputeActivityTest, BetweenStepsThatTakeMostOfTheTimeItStillComputes) {
  using std::chrono_literals::operator""ms;
  ComputeActivity activity;
  const ComputeActivityView view = ComputeActivityView::map(activity.fd()).value();
  EXPECT_EQ(view.is_mostly_computing(MonotonicClock::now()), std::nullopt);
  const TimePoint ended = compute_steps(activity, 9ms, 2ms);
  EXPECT_EQ(view.is_mostly_computing(ended + 2ms), true);
  EXPECT_EQ(view.is_mostly_computing(ended + ComputeActivityView::kLately), false);
  EXPECT_EQ(view.is_computing(ended + ComputeActivityView::kLately / 2), true);
}

TEST(ComputeActivityTest, BetweenStepsThatWaitMostOfTheTimeItDoesNot) {
  using std::chrono_literals::operator""ms;
  ComputeActivity activity;
  const ComputeActivityView view = ComputeActivityView::map(activity.fd()).value();
  const TimePoint ended = compute_steps(activity, 2ms, 9ms);
  EXPECT_EQ(view.is_mostly_computing(ended), false);
  EXPECT_EQ(view.is_computing(ended + 9ms), true) << "not a time to calibrate";
  activity.begin(ended + 9ms);
  EXPECT_EQ(view.is_mostly_computing(ended + 10ms), true);
  activity.end(ended + 209ms);
  EXPECT_EQ(view.is_mostly_computing(ended + 210ms), true) << "it has computed for long";
}

TEST(ComputeActivityTest, OtherDescriptorsAreNoActivity) {
  EXPECT_EQ(ComputeActivityView::map(UniqueFd()).error().code, ErrorCode::kProtocol);
  const UniqueFd pool = SharedMemory::create_pool("other", 64, true).value();
  EXPECT_EQ(ComputeActivityView::map(pool).error().code, ErrorCode::kProtocol);
  const auto larger = SharedMemory::create_single_writer("other", 128).value();
  EXPECT_EQ(ComputeActivityView::map(larger.fd).error().code, ErrorCode::kProtocol);
}

}  // namespace
}  // namespace kvferry::ipc
