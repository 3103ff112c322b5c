// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What a lane enqueues, and asks, and when.
#include "cache_manager/faulty_engine_fixture.hpp"
#include "kvferry/ipc/rank/compute_activity.hpp"
#include "mover/transfer_lane.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <thread>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using testing::Each;

class LaneOrderTest : public FaultyEngineFixture {
 protected:
  /// So many blocks are a call of half a slot.
  static constexpr std::uint32_t kBlocksOfACall = CopyDepth::kSlotBytes / 2 / kBlockBytes;

  void adjust(TransferEngine::Options& options) override {
    options.strategy = CopyStrategy::kDirect;
  }
  void adjust_arena(ipc::ArenaOptions& options) override {
    options.gpu_blocks = kPlaces;
    options.order = ipc::ArenaOrder::kBlockFirst;
    options.staging_slots = 0;
    options.staging_slot_bytes = 0;
  }

  void load(std::uint64_t id, std::uint32_t first, std::uint32_t count, std::uint8_t priority) {
    std::vector<Move> moves;
    for (std::uint32_t i = first; i < first + count; ++i) moves.push_back({i, i});
    ipc::MoverJob made = job(id, CopyDirection::kHostToDevice, moves);
    made.urgency.priority = priority;
    engine_->submit(std::move(made));
  }
};

TEST_F(LaneOrderTest, OfALoadThatIsFetchedAheadOneSlotIsEnqueuedAtMostAtAnyTurn) {
  constexpr std::uint32_t kCalls = 14;  // more than one turn of the oldest
  plan_.hold_copies();
  load(1, 0, kCalls * kBlocksOfACall, ipc::Urgency::kAhead);
  for (std::uint32_t ended = 0; ended + 2 < kCalls; ++ended) {
    ASSERT_TRUE(plan_.wait_held(ended + 2, test::soon()));
    ASSERT_LE(plan_.held(), ended + 2);
    plan_.let_go();
  }
  ASSERT_TRUE(plan_.wait_held(kCalls, test::soon()));
  plan_.let_all_go();
  EXPECT_THAT(wait_answer(1).results, Each(0));
  EXPECT_EQ(plan_.held(), kCalls) << "each was of half a slot";
}

// When its turn comes more is enqueued than may be of its like.
TEST_F(LaneOrderTest, ALoadThatIsFetchedAheadHasItsTurnsBesideOnesThatAreWaitedFor) {
  constexpr std::uint32_t kBlocksOfAnOrdinaryCall = 4 * kBlocksOfACall;
  plan_.hold_copies();
  load(1, 0, 3 * kBlocksOfACall, ipc::Urgency::kAhead);
  ASSERT_TRUE(plan_.wait_held(2, test::soon()));
  for (std::uint64_t id = 2; id < 12; ++id) {
    load(id, 3 * kBlocksOfACall, kBlocksOfAnOrdinaryCall, ipc::Urgency::kOrdinary);
  }
  // Two of those are enqueued at any time.
  ASSERT_TRUE(plan_.wait_held(4, test::soon()));
  plan_.let_go(2);
  for (const std::uint32_t held : {5U, 6U, 7U, 9U}) {
    plan_.let_go();
    ASSERT_TRUE(plan_.wait_held(held, test::soon())) << held;
    ASSERT_LE(plan_.held(), held);
  }
  plan_.let_go(2);
  EXPECT_THAT(wait_answer(1).results, Each(0)) << "the eighth was of it";
  plan_.let_all_go();
  for (std::uint64_t id = 2; id < 12; ++id) EXPECT_THAT(wait_answer(id).results, Each(0)) << id;
}

TEST_F(LaneOrderTest, WhetherTheWorkerComputesIsKnownBeforeTheFirstJob) {
  TransferLane lane(
      *device_, load_lane(), [](const ipc::MoverJobDone&) {},
      [](const ipc::Error& error) { ADD_FAILURE() << error.to_string(); });
  EXPECT_EQ(lane.is_computing(), std::nullopt);
  lane.greet();
  ipc::PacketSocket agent = next_hello();
  ipc::ComputeActivity activity;
  activity.begin();
  const int fd = activity.fd().get();
  ASSERT_TRUE(agent.send(ipc::encode(ipc::StageReply{}), std::array{fd}).has_value());
  const ipc::Deadline deadline = test::soon();
  while (!lane.is_computing() && !deadline.expired()) std::this_thread::yield();
  EXPECT_EQ(lane.is_computing(), true);
  EXPECT_TRUE(lane.idle()) << "nothing of it is a job";
}

}  // namespace
}  // namespace kvferry::cache_manager
