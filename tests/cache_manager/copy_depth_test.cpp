// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/copy_depth.hpp"

#include <gtest/gtest.h>

#include <array>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using std::chrono_literals::operator""ms;

constexpr std::uint64_t kMiB = 1ULL << 20;
constexpr CopyDepth::Kind kStraight{CopyStrategy::kDirect};
constexpr CopyDepth::Kind kGathered{CopyStrategy::kStaged};
constexpr std::array kStrategies = {CopyStrategy::kDirect,  CopyStrategy::kStaged,
                                    CopyStrategy::kStrided, CopyStrategy::kBatch,
                                    CopyStrategy::kMemcpy,  CopyStrategy::kKernel};

class CopyDepthTest : public testing::Test {
 protected:
  const ipc::TimePoint now_ = ipc::MonotonicClock::now();
  const ipc::TimePoint soon_ = now_ + CopyDepth::kLately - 1ms;
  const ipc::TimePoint later_ = now_ + CopyDepth::kLately;
};

TEST_F(CopyDepthTest, BlocksOfOnePieceGoByLargeCallsWhileNoBetterJobComes) {
  const CopyDepth stores(CopyDirection::kDeviceToHost, {});
  EXPECT_EQ(stores.call_bytes(kStraight, now_), 32 * kMiB);
  EXPECT_EQ(stores.most_bytes(kStraight, now_), 64 * kMiB);
  const CopyDepth loads(CopyDirection::kHostToDevice, {});
  EXPECT_EQ(loads.call_bytes(kStraight, now_), 16 * kMiB);
  EXPECT_EQ(loads.most_bytes(kStraight, now_), 32 * kMiB) << "a better load waits for so much";
}

TEST_F(CopyDepthTest, AfterABetterLoadTheNextOneWaitsForOneSlotForAWhile) {
  CopyDepth depth(CopyDirection::kHostToDevice, {});
  depth.note_better(now_);
  for (const ipc::TimePoint when : {now_, soon_}) {
    EXPECT_EQ(depth.call_bytes(kStraight, when), CopyDepth::kSlotBytes / 2);
    EXPECT_EQ(depth.most_bytes(kStraight, when), CopyDepth::kSlotBytes);
    EXPECT_EQ(depth.call_bytes(kGathered, when), CopyDepth::kSlotBytes);
    EXPECT_EQ(depth.most_bytes(kGathered, when), 2 * CopyDepth::kSlotBytes);
  }
  EXPECT_GT(depth.call_bytes(kStraight, later_), CopyDepth::kSlotBytes);
  EXPECT_GT(depth.most_bytes(kStraight, later_), 2 * CopyDepth::kSlotBytes);
}

TEST_F(CopyDepthTest, AfterABetterStoreTwoSlotsAreEnqueuedForAWhile) {
  CopyDepth depth(CopyDirection::kDeviceToHost, {});
  depth.note_better(now_);
  EXPECT_EQ(depth.call_bytes(kStraight, soon_), CopyDepth::kSlotBytes);
  EXPECT_EQ(depth.most_bytes(kStraight, soon_), 2 * CopyDepth::kSlotBytes);
  EXPECT_GT(depth.most_bytes(kStraight, later_), 2 * CopyDepth::kSlotBytes);
}

TEST_F(CopyDepthTest, WhereTheyAreExpectedABetterLoadNeverWaitsForMoreThanOneSlot) {
  for (const bool paced : {false, true}) {
    CopyDepth depth(CopyDirection::kHostToDevice, {paced, UrgentLoads::kAlways});
    for (const CopyStrategy strategy : kStrategies) {
      EXPECT_EQ(depth.most_bytes({strategy}, now_), CopyDepth::kSlotBytes) << to_string(strategy);
      const bool gathered = strategy == CopyStrategy::kStaged;
      EXPECT_EQ(depth.call_bytes({strategy}, now_), CopyDepth::kSlotBytes / (gathered ? 1 : 2))
          << to_string(strategy);
    }
  }
  const CopyDepth stores(CopyDirection::kDeviceToHost, {false, UrgentLoads::kAlways});
  EXPECT_EQ(stores.most_bytes(kStraight, now_), 64 * kMiB) << "no store goes before another";
}

TEST_F(CopyDepthTest, WhatIsFetchedAheadNeverHoldsUpALoadByMoreThanOneSlot) {
  CopyDepth loads(CopyDirection::kHostToDevice, {});
  for (const CopyStrategy strategy : kStrategies) {
    EXPECT_EQ(loads.most_bytes({strategy, true}, now_), CopyDepth::kSlotBytes)
        << to_string(strategy);
  }
  EXPECT_EQ(loads.most_bytes(kStraight, now_), 32 * kMiB) << "what is waited for goes as before";
  const CopyDepth stores(CopyDirection::kDeviceToHost, {});
  EXPECT_EQ(stores.most_bytes({CopyStrategy::kDirect, true}, now_), 64 * kMiB);
}

TEST_F(CopyDepthTest, TwoCallsAreUnderWayAtMost) {
  for (const auto direction : {CopyDirection::kDeviceToHost, CopyDirection::kHostToDevice}) {
    for (const UrgentLoads urgent : {UrgentLoads::kAuto, UrgentLoads::kAlways}) {
      CopyDepth depth(direction, {false, urgent});
      EXPECT_EQ(depth.most_bytes(kStraight, now_), 2 * depth.call_bytes(kStraight, now_));
      depth.note_better(now_);
      EXPECT_EQ(depth.most_bytes(kStraight, now_), 2 * depth.call_bytes(kStraight, now_));
    }
  }
}

TEST_F(CopyDepthTest, OthersAndPacedLanesGoBySlots) {
  const CopyDepth paced(CopyDirection::kDeviceToHost, {.paced = true});
  EXPECT_EQ(paced.call_bytes(kStraight, now_), CopyDepth::kSlotBytes);
  const CopyDepth depth(CopyDirection::kDeviceToHost, {});
  for (const CopyStrategy strategy :
       {CopyStrategy::kStaged, CopyStrategy::kStrided, CopyStrategy::kMemcpy, CopyStrategy::kKernel,
        CopyStrategy::kAgent}) {
    EXPECT_EQ(depth.call_bytes({strategy}, now_), CopyDepth::kSlotBytes) << to_string(strategy);
  }
  EXPECT_EQ(depth.call_bytes({CopyStrategy::kBatch}, now_), 2 * CopyDepth::kSlotBytes);
}

}  // namespace
}  // namespace kvferry::cache_manager
