// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/copy_depth.hpp"

#include <gtest/gtest.h>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using std::chrono_literals::operator""ms;

constexpr std::uint64_t kMiB = 1ULL << 20;

class CopyDepthTest : public testing::Test {
 protected:
  const ipc::TimePoint now_ = ipc::MonotonicClock::now();
};

TEST_F(CopyDepthTest, BlocksOfOnePieceGoByLargeCallsWhileNoBetterJobComes) {
  const CopyDepth stores(CopyDirection::kDeviceToHost, /*paced=*/false);
  EXPECT_EQ(stores.call_bytes(CopyStrategy::kDirect, now_), 32 * kMiB);
  EXPECT_EQ(stores.most_bytes(now_), 64 * kMiB);
  const CopyDepth loads(CopyDirection::kHostToDevice, /*paced=*/false);
  EXPECT_EQ(loads.call_bytes(CopyStrategy::kDirect, now_), 16 * kMiB);
  EXPECT_EQ(loads.most_bytes(now_), 32 * kMiB) << "a better load waits for so much";
}

TEST_F(CopyDepthTest, ABetterJobIsExpectedForAWhileAfterTheLastOne) {
  for (const auto direction : {CopyDirection::kDeviceToHost, CopyDirection::kHostToDevice}) {
    CopyDepth depth(direction, /*paced=*/false);
    depth.note_better(now_);
    for (const ipc::TimePoint when : {now_, now_ + CopyDepth::kLately - 1ms}) {
      EXPECT_EQ(depth.call_bytes(CopyStrategy::kDirect, when), CopyDepth::kSlotBytes);
      EXPECT_EQ(depth.most_bytes(when), 2 * CopyDepth::kSlotBytes);
    }
    const ipc::TimePoint later = now_ + CopyDepth::kLately;
    EXPECT_GT(depth.call_bytes(CopyStrategy::kDirect, later), CopyDepth::kSlotBytes);
    EXPECT_GT(depth.most_bytes(later), 2 * CopyDepth::kSlotBytes);
  }
}

TEST_F(CopyDepthTest, TwoCallsAreUnderWayAtMost) {
  for (const auto direction : {CopyDirection::kDeviceToHost, CopyDirection::kHostToDevice}) {
    const CopyDepth depth(direction, /*paced=*/false);
    EXPECT_EQ(depth.most_bytes(now_), 2 * depth.call_bytes(CopyStrategy::kDirect, now_));
  }
}

TEST_F(CopyDepthTest, OthersAndPacedLanesGoBySlots) {
  const CopyDepth paced(CopyDirection::kDeviceToHost, /*paced=*/true);
  EXPECT_EQ(paced.call_bytes(CopyStrategy::kDirect, now_), CopyDepth::kSlotBytes);
  const CopyDepth depth(CopyDirection::kDeviceToHost, /*paced=*/false);
  for (const CopyStrategy strategy :
       {CopyStrategy::kStaged, CopyStrategy::kStrided, CopyStrategy::kMemcpy, CopyStrategy::kKernel,
        CopyStrategy::kAgent}) {
    EXPECT_EQ(depth.call_bytes(strategy, now_), CopyDepth::kSlotBytes) << to_string(strategy);
  }
  EXPECT_EQ(depth.call_bytes(CopyStrategy::kBatch, now_), 2 * CopyDepth::kSlotBytes);
}

}  // namespace
}  // namespace kvferry::cache_manager
