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

TEST(ComputeActivityTest, OtherDescriptorsAreNoActivity) {
  EXPECT_EQ(ComputeActivityView::map(UniqueFd()).error().code, ErrorCode::kProtocol);
  const UniqueFd pool = SharedMemory::create_pool("other", 64, true).value();
  EXPECT_EQ(ComputeActivityView::map(pool).error().code, ErrorCode::kProtocol);
  const auto larger = SharedMemory::create_single_writer("other", 128).value();
  EXPECT_EQ(ComputeActivityView::map(larger.fd).error().code, ErrorCode::kProtocol);
}

}  // namespace
}  // namespace kvferry::ipc
