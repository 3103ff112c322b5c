// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Loads by layers whose blocks are checked while they are copied: the worker is told of nothing
// before that is decided, of everything after it, and of nothing at all when a block is damaged.
#include "cache_manager/faulty_engine_fixture.hpp"
#include "mover/transfer_lane.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using ipc::ErrorCode;
using ipc::PacketSocket;
using ipc::StageRequest;
using test::DeviceCall;
using testing::Each;
using testing::HasSubstr;

class CheckedLayersTest : public FaultyEngineFixture,
                          public testing::WithParamInterface<CopyStrategy> {
 protected:
  static constexpr std::uint32_t kBlocks = 3;

  // As many slots of the lane as the load has chunks.
  void adjust_arena(ipc::ArenaOptions& options) override { options.staging_slots = 8; }
  void SetUp() override {
    FaultyEngineFixture::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    mapped_ = std::make_shared<MappedArena>(*arena_);
    mapped_->session = session_;
    mapped_->strategy = GetParam();
    lane_.emplace(
        *device_, load_lane(), [this](ipc::MoverJobDone done) { answer(std::move(done)); },
        [this](const ipc::Error& error) { device_failed(error); });
  }
  void TearDown() override {
    lane_.reset();
    mapped_.reset();
    FaultyEngineFixture::TearDown();
  }

  std::shared_ptr<LoadCheck> submit(std::uint64_t id) {
    std::vector<Move> moves;
    for (std::uint32_t i = 0; i < kBlocks; ++i) {
      put_source(CopyDirection::kHostToDevice, {i, i}, contents(i));
      moves.push_back({i, i});
    }
    auto check = std::make_shared<LoadCheck>();
    ipc::MoverJob load = job(id, CopyDirection::kHostToDevice, moves);
    load.layers = ipc::LayerTicket{};
    lane_->submit(LaneJob{std::move(load), mapped_, pool_, ipc::MonotonicClock::now(), check});
    return check;
  }
  /// Load 1, copied as far as it may be, and what its check says; and the worker, which was
  /// greeted.
  std::pair<std::shared_ptr<LoadCheck>, PacketSocket> hold_load() {
    auto check = submit(1);
    PacketSocket worker = next_hello();
    greet(worker);
    wait_copied();
    return {std::move(check), std::move(worker)};
  }
  void decide(LoadCheck& check, bool is_good) {
    check.decide(is_good);
    lane_->look_again();
  }
  /// Until the lane has seen the end of a copy and been around again. @pre one was submitted.
  void wait_copied() {
    ASSERT_TRUE(plan_.wait_calls(DeviceCall::kWriteWord, 1, test::soon()));
    wait_looks([this] { lane_->look_again(); });
  }
  /// Until the worker was told of all layers, in order.
  static void serve(PacketSocket& worker) {
    StageRequest request;
    std::uint32_t through = 0;
    do {
      request = next_request(worker);
      ASSERT_TRUE(request.layers.has_value());
      EXPECT_GE(request.layers->through, through);
      through = request.layers->through;
      reply(worker, request);
    } while (!request.layers->last);
  }

  std::shared_ptr<MappedArena> mapped_;
  std::optional<TransferLane> lane_;
};

TEST_P(CheckedLayersTest, TheWorkerIsToldOfNothingBeforeTheCheckIsDecided) {
  auto [check, worker] = hold_load();
  expect_silent(worker);
  EXPECT_FALSE(is_answered(1));
  decide(*check, true);
  serve(worker);
  EXPECT_THAT(wait_answer(1).results, Each(0));
}

TEST_P(CheckedLayersTest, WhatIsCopiedAfterTheDecisionDoesNotGoPastWhatWasHeldBefore) {
  plan_.hold_copies();
  const auto check = submit(1);
  PacketSocket worker = next_hello();
  greet(worker);
  ASSERT_TRUE(plan_.wait_held(2, test::soon()));
  plan_.let_go();
  wait_copied();
  // The lane learns of it only when it sees the next copy's end.
  check->decide(true);
  plan_.let_all_go();
  serve(worker);
  EXPECT_THAT(wait_answer(1).results, Each(0));
}

TEST_P(CheckedLayersTest, ADamagedBlockEndsItAndTheWorkerIsToldOfNothing) {
  auto [check, worker] = hold_load();
  decide(*check, false);
  const ipc::MoverJobDone done = wait_answer(1);
  EXPECT_THAT(done.results, Each(static_cast<std::uint8_t>(ErrorCode::kCancelled)));
  EXPECT_THAT(done.message, HasSubstr("damaged"));
  expect_silent(worker);
  // Its slots are free again.
  decide(*submit(2), true);
  serve(worker);
  EXPECT_THAT(wait_answer(2).results, Each(0));
}

TEST_P(CheckedLayersTest, WhatWasFoundBeforeTheCopyEndedCounts) {
  const auto damaged = submit(1);
  damaged->decide(false);
  PacketSocket worker = next_hello();
  greet(worker);
  EXPECT_THAT(wait_answer(1).results, Each(static_cast<std::uint8_t>(ErrorCode::kCancelled)));
  expect_silent(worker);
}

TEST_P(CheckedLayersTest, TheEndOfTheEpochDoesNotWaitForACheck) {
  auto [check, worker] = hold_load();
  lane_->revoke(ErrorCode::kRevoked);
  EXPECT_THAT(wait_answer(1).results, Each(static_cast<std::uint8_t>(ErrorCode::kRevoked)));
  EXPECT_TRUE(lane_->wait_idle(test::soon()).has_value());
}

TEST_P(CheckedLayersTest, ACancelledLoadDoesNotWaitForItsCheck) {
  auto [check, worker] = hold_load();
  lane_->cancel(ipc::JobId{1});
  EXPECT_THAT(wait_answer(1).results, Each(static_cast<std::uint8_t>(ErrorCode::kCancelled)));
  decide(*check, true);
  expect_silent(worker);
}

TEST_P(CheckedLayersTest, ALaneThatEndsDoesNotWaitForACheckThatNobodyEnds) {
  auto [check, worker] = hold_load();
  lane_.reset();
  EXPECT_THAT(wait_answer(1).results, Each(static_cast<std::uint8_t>(ErrorCode::kCancelled)));
}

TEST_P(CheckedLayersTest, AWorkerThatIsLostMeanwhileFailsItAndIsFoundAgain) {
  auto [check, worker] = hold_load();
  worker = PacketSocket();
  decide(*check, true);
  EXPECT_THAT(wait_answer(1).results, Each(static_cast<std::uint8_t>(ErrorCode::kPeerDied)));
  decide(*submit(2), true);
  worker = next_hello();
  greet(worker);
  serve(worker);
  EXPECT_THAT(wait_answer(2).results, Each(0));
}

// Of the ring it leaves some slots to others.
TEST_P(CheckedLayersTest, ALoadThatIsNotCheckedGoesPastOneThatIs) {
  auto [check, worker] = hold_load();
  put_place(7, contents(7));
  ipc::MoverJob other = job(2, CopyDirection::kHostToDevice, {{7, 7}});
  lane_->submit(LaneJob{std::move(other), mapped_, pool_, ipc::MonotonicClock::now()});
  if (GetParam() == CopyStrategy::kStaged) {
    const StageRequest request = next_request(worker);
    EXPECT_FALSE(request.layers.has_value());
    reply(worker, request);
  }
  EXPECT_THAT(wait_answer(2).results, Each(0));
  EXPECT_FALSE(is_answered(1));
  decide(*check, true);
  serve(worker);
  EXPECT_THAT(wait_answer(1).results, Each(0));
}

INSTANTIATE_TEST_SUITE_P(Strategies,
                         CheckedLayersTest,
                         testing::Values(CopyStrategy::kStaged, CopyStrategy::kBatch),
                         [](const auto& param) { return std::string(to_string(param.param)); });

}  // namespace
}  // namespace kvferry::cache_manager
