// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Several jobs under way in one lane: the next one's chunks begin before the last one's have ended,
// and each job ends with its own.
#include "cache_manager/staged_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using ipc::ErrorCode;
using ipc::PacketSocket;
using ipc::StageRequest;
using testing::Each;

class StagedJobsTest : public StagedFixture {
 protected:
  static std::uint8_t code(ErrorCode error) { return static_cast<std::uint8_t>(error); }
};

TEST_F(StagedJobsTest, TheNextJobsGathersAreAskedForBeforeTheLastOnesHaveEnded) {
  submit(1, CopyDirection::kDeviceToHost);
  PacketSocket agent = next_hello();
  greet(agent);
  const StageRequest first = next_request(agent);
  submit(2, CopyDirection::kDeviceToHost);
  submit(3, CopyDirection::kDeviceToHost);
  const StageRequest second = next_request(agent);
  const StageRequest third = next_request(agent);
  EXPECT_NE(first.slot, second.slot);
  EXPECT_NE(first.slot, third.slot);
  EXPECT_NE(second.slot, third.slot);
  // Each ends with its own, in whatever order.
  reply(agent, second);
  EXPECT_EQ(wait_answer(2).results, std::vector<std::uint8_t>{0});
  EXPECT_FALSE(is_answered(1));
  EXPECT_FALSE(is_answered(3));
  reply(agent, third);
  reply(agent, first);
  EXPECT_EQ(wait_answer(1).results, std::vector<std::uint8_t>{0});
  EXPECT_EQ(wait_answer(3).results, std::vector<std::uint8_t>{0});
}

TEST_F(StagedJobsTest, TheWorkerIsToldOfLoadsThatNobodyWaitsForYet) {
  PacketSocket loads;
  for (const std::uint8_t priority : {ipc::Urgency::kAhead, ipc::Urgency::kOrdinary}) {
    submit(priority, CopyDirection::kHostToDevice, 1, priority);
    if (!loads.valid()) {
      loads = next_hello();
      greet(loads);
    }
    const StageRequest request = next_request(loads);
    EXPECT_EQ(request.is_ahead, priority == ipc::Urgency::kAhead);
    reply(loads, request);
    EXPECT_THAT(wait_answer(priority).results, Each(0));
  }
  submit(9, CopyDirection::kDeviceToHost, 1, ipc::Urgency::kAhead);
  PacketSocket stores = next_hello();
  greet(stores);
  const StageRequest request = next_request(stores);
  EXPECT_FALSE(request.is_ahead);
  reply(stores, request);
  EXPECT_THAT(wait_answer(9).results, Each(0));
}

TEST_F(StagedJobsTest, NoMoreIsUnderWayThanThereAreSlotsAndABetterJobGoesNext) {
  submit(1, CopyDirection::kDeviceToHost, kSlotsOfLane + 2);
  PacketSocket agent = next_hello();
  greet(agent);
  std::vector<StageRequest> asked;
  for (std::uint32_t i = 0; i < kSlotsOfLane; ++i) asked.push_back(next_request(agent));
  submit(2, CopyDirection::kDeviceToHost, 1, 9);
  reply(agent, asked[0]);
  // Its slot goes to the better job although the first one has more to do.
  const StageRequest better = next_request(agent);
  EXPECT_EQ(better.slot, asked[0].slot);
  reply(agent, better);
  EXPECT_EQ(wait_answer(2).results, std::vector<std::uint8_t>{0});
  EXPECT_FALSE(is_answered(1));
  for (std::uint32_t i = 1; i < kSlotsOfLane; ++i) reply(agent, asked[i]);
  for (int i = 0; i < 2; ++i) reply(agent, next_request(agent));
  EXPECT_THAT(wait_answer(1).results, Each(0));
}

TEST_F(StagedJobsTest, ACancelledJobStartsNothingMoreAndTheOthersGoOn) {
  submit(1, CopyDirection::kDeviceToHost, kSlotsOfLane + 1);
  PacketSocket agent = next_hello();
  greet(agent);
  std::vector<StageRequest> asked;
  for (std::uint32_t i = 0; i < kSlotsOfLane; ++i) asked.push_back(next_request(agent));
  submit(2, CopyDirection::kDeviceToHost);
  engine_->cancel(ipc::JobId{1});
  for (const StageRequest& request : asked) reply(agent, request);
  const ipc::MoverJobDone cancelled = wait_answer(1);
  EXPECT_EQ(std::count(cancelled.results.begin(), cancelled.results.end(), 0), kSlotsOfLane);
  EXPECT_EQ(
      std::count(cancelled.results.begin(), cancelled.results.end(), code(ErrorCode::kCancelled)),
      1);
  reply(agent, next_request(agent));
  EXPECT_EQ(wait_answer(2).results, std::vector<std::uint8_t>{0});
}

TEST_F(StagedJobsTest, ALostConnectionFailsAllThatIsUnderWayAndNothingElse) {
  submit(1, CopyDirection::kHostToDevice);
  submit(2, CopyDirection::kHostToDevice);
  {
    PacketSocket agent = next_hello();
    greet(agent);
    (void)next_request(agent);
    (void)next_request(agent);
  }
  PacketSocket agent = next_hello();
  submit(3, CopyDirection::kHostToDevice);
  EXPECT_FALSE(is_answered(1));
  EXPECT_FALSE(is_answered(2));
  greet(agent);
  EXPECT_EQ(wait_answer(1).results, std::vector<std::uint8_t>{code(ErrorCode::kPeerDied)});
  EXPECT_EQ(wait_answer(2).results, std::vector<std::uint8_t>{code(ErrorCode::kPeerDied)});
  reply(agent, next_request(agent));
  EXPECT_EQ(wait_answer(3).results, std::vector<std::uint8_t>{0});
}

TEST_F(StagedJobsTest, EachJobThatWaitsForAGreetingInVainIsAnsweredAtItsOwnTime) {
  submit(1, CopyDirection::kHostToDevice);
  submit(2, CopyDirection::kHostToDevice);
  PacketSocket agent = next_hello();
  EXPECT_EQ(wait_answer(1).results, std::vector<std::uint8_t>{code(ErrorCode::kTimeout)});
  EXPECT_FALSE(is_answered(2)) << "it has its own time";
  greet(agent);
  reply(agent, next_request(agent));
  EXPECT_EQ(wait_answer(2).results, std::vector<std::uint8_t>{0});
}

TEST_F(StagedJobsTest, AJobWhoseNumberRunsAlreadyIsRefused) {
  submit(1, CopyDirection::kHostToDevice);
  PacketSocket agent = next_hello();
  greet(agent);
  const StageRequest request = next_request(agent);
  submit(1, CopyDirection::kHostToDevice);
  EXPECT_EQ(wait_answer(1).results, std::vector<std::uint8_t>{code(ErrorCode::kInvalidArgument)});
  forget_answer(1);
  reply(agent, request);
  EXPECT_EQ(wait_answer(1).results, std::vector<std::uint8_t>{0});
}

TEST_F(StagedJobsTest, TheEndOfTheEpochAbandonsTheHandOversOfAllJobs) {
  submit(1, CopyDirection::kHostToDevice);
  submit(2, CopyDirection::kHostToDevice, 2);
  PacketSocket agent = next_hello();
  greet(agent);
  for (int i = 0; i < 3; ++i) (void)next_request(agent);
  EXPECT_TRUE(engine_->quiesce(ipc::Epoch{1}, test::soon()).has_value());
  EXPECT_FALSE(is_answered(1)) << "the worker may still write the block";
  EXPECT_FALSE(is_answered(2));
  PacketSocket next = next_hello();
  greet(next);
  EXPECT_THAT(wait_answer(1).results, Each(code(ErrorCode::kRevoked)));
  EXPECT_THAT(wait_answer(2).results, Each(code(ErrorCode::kRevoked)));
}

}  // namespace
}  // namespace kvferry::cache_manager
