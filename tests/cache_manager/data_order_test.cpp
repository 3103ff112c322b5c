// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What the data path orders without any event between processes: whoever is late at a point, what
// comes after that point does not come before it, and the bytes are right. The late one is held by
// the test; that something has not come is looked at once the lane's thread has been around again.
// One source, one binary per backend.
#include "cache_manager/faulty_engine_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using ipc::PacketSocket;
using ipc::StageRequest;
using test::DeviceCall;
using testing::Each;

constexpr std::uint64_t kOld = 1000;

class DataOrderTest : public FaultyEngineFixture {
 protected:
  void adjust_arena(ipc::ArenaOptions& options) override { options.gpu_blocks = 32; }

  void SetUp() override {
    FaultyEngineFixture::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    // Kernels are loaded when they are first launched, which may wait for all streams, held ones
    // too.
    access_->gather(0, arena_->staging_slot(0));
    access_->scatter(0, arena_->staging_slot(0));
  }

  [[nodiscard]] ipc::DevicePtr slot(const StageRequest& request) const {
    return arena_->staging_slot(request.slot);
  }
  /// As the worker does. @pre slots hold one block.
  void gather(const StageRequest& request) { access_->gather(request.blocks.at(0), slot(request)); }
  void scatter(const StageRequest& request) {
    access_->scatter(request.blocks.at(0), slot(request));
  }
  /// A job that moves `count` blocks from `first` on, to or from the places of the same numbers.
  /// What it reads is contents(number).
  void submit_blocks(std::uint64_t id,
                     CopyDirection direction,
                     std::uint32_t first,
                     std::uint32_t count = 1) {
    std::vector<Move> moves;
    for (std::uint32_t i = first; i < first + count; ++i) {
      moves.push_back({i, i});
      put_source(direction, moves.back(), contents(i));
    }
    engine_->submit(job(id, direction, moves));
  }
  void expect_moved(std::uint64_t id,
                    CopyDirection direction,
                    std::uint32_t first,
                    std::uint32_t count = 1) {
    const ipc::MoverJobDone done = wait_answer(id);
    ASSERT_EQ(done.results.size(), count);
    EXPECT_THAT(done.results, Each(0)) << done.message;
    // Once it is answered, others may write what it was copied from.
    for (std::uint32_t i = first; i < first + count; ++i) overwrite_source(direction, {i, i});
    for (std::uint32_t i = first; i < first + count; ++i) {
      EXPECT_TRUE(target(direction, {i, i}) == contents(i)) << "block " << i;
    }
  }
  void overwrite_source(CopyDirection direction, const Move& move) {
    if (direction == CopyDirection::kDeviceToHost) {
      put_block(move.block, contents(kOld));
    } else {
      put_place(move.place, contents(kOld));
    }
  }
  /// The drain does not wait for the agent, whose kernels its worker waits for before it gives the
  /// arena up. The blocks are the kernel's until the agent says that it runs nothing.
  void abandoned_waits_for_its_kernel(CopyDirection direction) {
    submit_blocks(1, direction, 0);
    PacketSocket agent = connect();
    const StageRequest request = next_request(agent);
    if (direction == CopyDirection::kDeviceToHost) {
      access_->begin_gather(request.blocks.at(0), slot(request));
    } else {
      access_->begin_scatter(request.blocks.at(0), slot(request));
    }
    ASSERT_TRUE(engine_->quiesce(ipc::Epoch{1}, test::soon()).has_value());
    EXPECT_FALSE(is_answered(1));
    (void)next_hello();  // As if the agent were too busy to greet.
    EXPECT_FALSE(is_answered(1));
    access_->end();
    PacketSocket again = connect();
    EXPECT_THAT(wait_answer(1).results, Each(static_cast<std::uint8_t>(ipc::ErrorCode::kRevoked)));
  }
  PacketSocket connect() {
    PacketSocket agent = next_hello();
    greet(agent);
    return agent;
  }
};

class StraightOrderTest : public DataOrderTest, public testing::WithParamInterface<CopyStrategy> {
 protected:
  void adjust(TransferEngine::Options& options) override { options.strategy = GetParam(); }
  void adjust_arena(ipc::ArenaOptions& options) override {
    DataOrderTest::adjust_arena(options);
    if (GetParam() == CopyStrategy::kDirect) options.order = ipc::ArenaOrder::kBlockFirst;
  }
  void answers_come_after_their_copies(CopyDirection direction) {
    plan_.hold_copies();
    submit_blocks(1, direction, 0);
    ASSERT_TRUE(plan_.wait_held(1, test::soon()));
    submit_blocks(2, direction, 1);
    ASSERT_TRUE(plan_.wait_held(2, test::soon()));
    wait_lane(direction);
    EXPECT_FALSE(is_answered(1));
    EXPECT_FALSE(is_answered(2));
    EXPECT_TRUE(target(direction, {0, 0}) == Bytes(kBlockBytes, 0xEE)) << "it is held";
    plan_.let_go();
    expect_moved(1, direction, 0);
    submit_blocks(3, direction, 2);
    ASSERT_TRUE(plan_.wait_held(3, test::soon()));
    wait_lane(direction);
    EXPECT_FALSE(is_answered(2));
    plan_.let_all_go();
    expect_moved(2, direction, 1);
    expect_moved(3, direction, 2);
  }
};

TEST_P(StraightOrderTest, StoreIsAnsweredOnlyAfterItsCopyHasEnded) {
  answers_come_after_their_copies(CopyDirection::kDeviceToHost);
}

TEST_P(StraightOrderTest, LoadIsAnsweredOnlyAfterItsCopyHasEnded) {
  answers_come_after_their_copies(CopyDirection::kHostToDevice);
}

// The drain is what lets the arena go: with a copy in the stream it would go under it.
TEST_P(StraightOrderTest, DrainEndsOnlyAfterTheCopiesHaveEnded) {
  plan_.hold_copies();
  submit_blocks(1, CopyDirection::kDeviceToHost, 0);
  ASSERT_TRUE(plan_.wait_held(1, test::soon()));
  const ipc::Status early =
      engine_->quiesce(ipc::Epoch{1}, ipc::Deadline::after(ipc::Duration::zero()));
  ASSERT_FALSE(early.has_value());
  EXPECT_EQ(early.error().code, ipc::ErrorCode::kTimeout);
  EXPECT_FALSE(is_answered(1));
  plan_.let_all_go();
  EXPECT_TRUE(engine_->quiesce(ipc::Epoch{1}, test::soon()).has_value());
  expect_moved(1, CopyDirection::kDeviceToHost, 0);
}

INSTANTIATE_TEST_SUITE_P(Strategies,
                         StraightOrderTest,
                         testing::Values(CopyStrategy::kStrided,
                                         CopyStrategy::kBatch,
                                         CopyStrategy::kMemcpy,
                                         CopyStrategy::kDirect),
                         [](const auto& instance) {
                           return std::string(to_string(instance.param));
                         });

TEST_F(DataOrderTest, StagedStoreIsAnsweredOnlyAfterItsCopyHasEnded) {
  plan_.hold_copies();
  submit_blocks(1, CopyDirection::kDeviceToHost, 0);
  PacketSocket agent = connect();
  const StageRequest first = next_request(agent);
  gather(first);
  reply(agent, first);
  ASSERT_TRUE(plan_.wait_held(1, test::soon()));
  submit_blocks(2, CopyDirection::kDeviceToHost, 1);
  const StageRequest second = next_request(agent);
  EXPECT_NE(second.slot, first.slot) << "its copy has not read it yet";
  wait_lane(CopyDirection::kDeviceToHost);
  EXPECT_FALSE(is_answered(1));
  plan_.let_all_go();
  expect_moved(1, CopyDirection::kDeviceToHost, 0);
  gather(second);
  reply(agent, second);
  expect_moved(2, CopyDirection::kDeviceToHost, 1);
}

TEST_F(DataOrderTest, StagedStoreCopiesASlotOnlyAfterItsGatherWasAnswered) {
  submit_blocks(1, CopyDirection::kDeviceToHost, 0);
  PacketSocket agent = connect();
  const StageRequest first = next_request(agent);
  // What is there from an earlier job, and the gather is under way all the time.
  access_->put_packed(slot(first), contents(kOld));
  const auto late = make_access();
  late->begin_gather(first.blocks.at(0), slot(first));
  submit_blocks(2, CopyDirection::kDeviceToHost, 1);
  const StageRequest second = next_request(agent);
  gather(second);
  reply(agent, second);
  expect_moved(2, CopyDirection::kDeviceToHost, 1);
  wait_lane(CopyDirection::kDeviceToHost);
  EXPECT_EQ(plan_.calls(DeviceCall::kCopy), 1U);
  EXPECT_TRUE(place(0) == Bytes(kBlockBytes, 0xEE));
  late->end();
  reply(agent, first);
  expect_moved(1, CopyDirection::kDeviceToHost, 0);
}

TEST_F(DataOrderTest, StagedLoadAsksForItsScatterOnlyAfterItsCopyHasEnded) {
  submit_blocks(1, CopyDirection::kHostToDevice, 0);
  PacketSocket agent = connect();
  const StageRequest warm = next_request(agent);
  scatter(warm);
  reply(agent, warm);
  expect_moved(1, CopyDirection::kHostToDevice, 0);
  plan_.hold_copies();
  submit_blocks(2, CopyDirection::kHostToDevice, 1);
  ASSERT_TRUE(plan_.wait_held(1, test::soon()));
  submit_blocks(3, CopyDirection::kHostToDevice, 2);
  ASSERT_TRUE(plan_.wait_held(2, test::soon()));
  wait_lane(CopyDirection::kHostToDevice);
  ASSERT_NO_FATAL_FAILURE(expect_silent(agent));
  plan_.let_all_go();
  for (int i = 0; i < 2; ++i) {
    const StageRequest request = next_request(agent);
    scatter(request);
    reply(agent, request);
  }
  expect_moved(2, CopyDirection::kHostToDevice, 1);
  expect_moved(3, CopyDirection::kHostToDevice, 2);
}

TEST_F(DataOrderTest, StagedLoadIsAnsweredOnlyAfterItsScatterWasAnswered) {
  submit_blocks(1, CopyDirection::kHostToDevice, 0);
  PacketSocket agent = connect();
  const StageRequest first = next_request(agent);
  EXPECT_TRUE(access_->get_packed(slot(first)) == contents(0));
  const auto late = make_access();
  late->begin_scatter(first.blocks.at(0), slot(first));
  submit_blocks(2, CopyDirection::kHostToDevice, 1);
  const StageRequest second = next_request(agent);
  scatter(second);
  reply(agent, second);
  expect_moved(2, CopyDirection::kHostToDevice, 1);
  wait_lane(CopyDirection::kHostToDevice);
  EXPECT_FALSE(is_answered(1));
  EXPECT_TRUE(block(0) == Bytes(kBlockBytes, 0xEE));
  late->end();
  reply(agent, first);
  expect_moved(1, CopyDirection::kHostToDevice, 0);
}

TEST_F(DataOrderTest, StoreThatADrainAbandonsIsAnsweredOnlyAfterItsGatherHasEnded) {
  abandoned_waits_for_its_kernel(CopyDirection::kDeviceToHost);
}

TEST_F(DataOrderTest, LoadThatADrainAbandonsIsAnsweredOnlyAfterItsScatterHasEnded) {
  abandoned_waits_for_its_kernel(CopyDirection::kHostToDevice);
}

// The agent writes each slot as soon as it is asked to: one that is given on early holds the next
// chunk's bytes by the time its copy runs.
TEST_F(DataOrderTest, SlotOfAStoreIsGivenOnOnlyAfterItsCopyHasEnded) {
  constexpr std::uint32_t kChunks = 3 * kSlotsOfLane;
  plan_.hold_copies();
  submit_blocks(1, CopyDirection::kDeviceToHost, 0, kChunks);
  PacketSocket agent = connect();
  std::uint32_t asked = 0;
  std::uint32_t let_go = 0;
  const auto answer_next = [&] {
    const StageRequest request = next_request(agent);
    gather(request);
    reply(agent, request);
    ++asked;
    return plan_.wait_held(asked, test::soon());
  };
  while (asked < kSlotsOfLane) ASSERT_TRUE(answer_next());
  while (asked < kChunks) {
    wait_lane(CopyDirection::kDeviceToHost);
    // A notice may tell of two copies at once, so that nothing need come before the second one.
    pollfd waited{agent.fd(), POLLIN, 0};
    if (::poll(&waited, 1, 0) == 1) {
      ASSERT_TRUE(answer_next());
      EXPECT_LE(asked, kSlotsOfLane + let_go) << "every slot had a copy that had not ended";
    } else {
      ASSERT_LT(let_go, asked) << "a slot whose copy has ended is not used again";
      plan_.let_go();
      ++let_go;
      const bool all_ended = let_go == asked;
      ASSERT_TRUE(!all_ended || answer_next());
    }
  }
  plan_.let_all_go();
  expect_moved(1, CopyDirection::kDeviceToHost, 0, kChunks);
}

TEST_F(DataOrderTest, SlotOfALoadIsGivenOnOnlyAfterItsScatterWasAnswered) {
  constexpr std::uint32_t kChunks = 3 * kSlotsOfLane;
  submit_blocks(1, CopyDirection::kHostToDevice, 0, kChunks);
  PacketSocket agent = connect();
  std::vector<StageRequest> open;
  for (std::uint32_t answered = 0; answered < kChunks; ++answered) {
    while (open.size() < std::min(kSlotsOfLane, kChunks - answered)) {
      open.push_back(next_request(agent));
    }
    wait_lane(CopyDirection::kHostToDevice);
    EXPECT_EQ(plan_.calls(DeviceCall::kCopy), std::min(kChunks, answered + kSlotsOfLane));
    ASSERT_NO_FATAL_FAILURE(expect_silent(agent));
    // Any of them: the agent's launches end as they like.
    const auto done = open.begin() + answered % static_cast<std::uint32_t>(open.size());
    scatter(*done);
    reply(agent, *done);
    open.erase(done);
  }
  expect_moved(1, CopyDirection::kHostToDevice, 0, kChunks);
}

}  // namespace
}  // namespace kvferry::cache_manager
