// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/step_guard.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <new>
#include <stdexcept>

namespace kvferry::worker {
namespace {

using ipc::ErrorCode;
using ipc::Status;
using std::chrono_literals::operator""ms;
using testing::HasSubstr;

TEST(StepGuardTest, PassesOnWhatAStepReturns) {
  EXPECT_TRUE(guard_step([] { return ipc::ok(); }).has_value());
  const Status failed =
      guard_step([]() -> Status { return KVFERRY_ERROR(kCuda, "illegal address"); });
  EXPECT_EQ(failed.error().code, ErrorCode::kCuda);
}

TEST(StepGuardTest, MakesAnErrorOfWhateverAStepThrows) {
  const Status own = guard_step(
      []() -> Status { throw ipc::Exception(KVFERRY_ERROR(kNoDeviceMemory, "no segment")); });
  EXPECT_EQ(own.error().code, ErrorCode::kNoDeviceMemory);
  const Status memory = guard_step([]() -> Status { throw std::bad_alloc(); });
  EXPECT_EQ(memory.error().code, ErrorCode::kNoHostMemory);
  const Status error = guard_step([]() -> Status { throw std::range_error("3 heads of 2"); });
  EXPECT_EQ(error.error().code, ErrorCode::kSystem);
  EXPECT_THAT(error.error().message, HasSubstr("3 heads of 2"));
  const Status odd = guard_step([]() -> Status { throw 7; });
  EXPECT_EQ(odd.error().code, ErrorCode::kSystem);
}

TEST(FailureRuleTest, EmptiesAlwaysWhenMemoryRanOutAndElseOnceASecond) {
  const ipc::Error memory = KVFERRY_ERROR(kNoDeviceMemory, "no segment");
  const ipc::Error other = KVFERRY_ERROR(kCuda, "illegal address");
  FailureRule rule;
  ipc::TimePoint now = ipc::MonotonicClock::now();
  EXPECT_TRUE(rule.empties(other, now)) << "the first one";
  EXPECT_FALSE(rule.empties(other, now + 999ms));
  EXPECT_TRUE(rule.empties(memory, now + 999ms));
  EXPECT_TRUE(rule.empties(memory, now + 999ms));
  now += 999ms;
  EXPECT_FALSE(rule.empties(other, now + 999ms)) << "any emptying counts";
  EXPECT_TRUE(rule.empties(other, now + 1000ms));
}

}  // namespace
}  // namespace kvferry::worker
