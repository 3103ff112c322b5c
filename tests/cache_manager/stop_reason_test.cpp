// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/stop_reason.hpp"

#include <gtest/gtest.h>

namespace kvferry::cache_manager {
namespace {

using ipc::ErrorCode;

TEST(StopReasonTest, EndOfTheEpochOutlastsTheLossOfTheManager) {
  StopReason reason;
  EXPECT_EQ(reason.get(), std::nullopt);
  reason.add(ErrorCode::kRevoked);
  reason.add(ErrorCode::kCancelled);
  EXPECT_EQ(reason.get(), ErrorCode::kRevoked);
}

TEST(StopReasonTest, EndOfTheEpochReplacesACancellation) {
  StopReason reason;
  reason.add(ErrorCode::kCancelled);
  EXPECT_EQ(reason.get(), ErrorCode::kCancelled);
  reason.add(ErrorCode::kRevoked);
  EXPECT_EQ(reason.get(), ErrorCode::kRevoked);
}

TEST(StopReasonTest, NextJobHasNone) {
  StopReason reason;
  reason.add(ErrorCode::kRevoked);
  reason.reset();
  EXPECT_EQ(reason.get(), std::nullopt);
}

}  // namespace
}  // namespace kvferry::cache_manager
