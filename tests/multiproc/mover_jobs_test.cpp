// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "multiproc/mover_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvferry {
namespace {

using ipc::CopyDirection;
using ipc::ErrorCode;

using MoverJobsTest = test::MoverFixture;

// A manager's job may cross with the clear that ends its epoch.
TEST_F(MoverJobsTest, JobOfAnotherEpochIsRefusedAndTheNextOneServed) {
  const ipc::RankState current = arena_;
  fill(7);
  arena_.epoch.value += 1;
  EXPECT_EQ(copy(CopyDirection::kDeviceToHost), static_cast<std::uint8_t>(ErrorCode::kStaleEpoch));
  arena_ = current;
  arena_.session = ipc::SessionId::random();
  EXPECT_EQ(copy(CopyDirection::kDeviceToHost), static_cast<std::uint8_t>(ErrorCode::kStaleEpoch));
  arena_ = current;
  store();
  load();
  EXPECT_THAT(verify(7), testing::Each(0U));
}

}  // namespace
}  // namespace kvferry
