// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// How the manager has rank 0's weights handed on: by a broadcast where the ranks' devices reach
// each other, else in messages; and what it does when a rank fails in the middle.
#include "multiproc/manager/manager_generation_fixture.hpp"

#include <gmock/gmock.h>

namespace kvferry::test {
namespace {

using ipc::BroadcastId;
using ipc::BroadcastPhase;
using ipc::BroadcastPort;
using ipc::WeightsPhase;
using testing::HasSubstr;

const BroadcastPort kFirst{"nccl 2.28.9", "gpu-0", {}};
const BroadcastPort kSecond{"nccl 2.28.9", "gpu-1", {}};
const BroadcastId kId{1, 2, 3};

class ManagerBroadcastTest : public ManagerGenerationTest {
 protected:
  void start_update() {
    ASSERT_NO_FATAL_FAILURE(start_scheduling());
    ask_again();
  }
  void ask_again() {
    ipc::UpdateWeightsRequest request;
    request.engine = "chat";
    request.source = {ipc::WeightsFrom::kDistributed, "/new.safetensors"};
    operator_->ask(MessageKind::kUpdateWeights, request);
    ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
    ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  }
  void show_port(std::uint32_t rank, const BroadcastPort& port) {
    const auto request = workers_[rank]->next(MessageKind::kRankBroadcast);
    ASSERT_TRUE(request.has_value()) << "rank " << rank << " was not asked";
    workers_[rank]->reply(*request, ipc::RankBroadcastReply{port, {}});
  }
  void refuse_port(std::uint32_t rank, const ipc::Error& error) {
    const auto request = workers_[rank]->next(MessageKind::kRankBroadcast);
    ASSERT_TRUE(request.has_value()) << "rank " << rank << " was not asked";
    workers_[rank]->reply_error(*request, error);
  }
  std::optional<ipc::Envelope> asked_to_open(ipc::RankBroadcast* seen = nullptr) {
    auto request = workers_[0]->next(MessageKind::kRankBroadcast);
    if (!request) return request;
    const auto order = ipc::decode<ipc::RankBroadcast>(request->body, "RankBroadcast");
    EXPECT_TRUE(order.has_value());
    EXPECT_EQ(order->phase, BroadcastPhase::kOpen);
    EXPECT_EQ(order->file, "/new.safetensors");
    if (order && seen != nullptr) *seen = *order;
    return request;
  }
  void open(const BroadcastId& id) {
    ASSERT_NO_FATAL_FAILURE(show_port(0, kFirst));
    ASSERT_NO_FATAL_FAILURE(show_port(1, kSecond));
    const auto request = asked_to_open();
    ASSERT_TRUE(request.has_value());
    workers_[0]->reply(*request, ipc::RankBroadcastReply{{}, id});
  }
  ipc::Envelope order_at(std::uint32_t rank, WeightsPhase phase, ipc::RankWeights* seen = nullptr) {
    const auto request = workers_[rank]->next(MessageKind::kRankWeights);
    if (!request) {
      ADD_FAILURE() << "rank " << rank << " was not asked";
      return {};
    }
    const auto order = ipc::decode<ipc::RankWeights>(request->body, "RankWeights");
    EXPECT_TRUE(order && order->phase == phase) << "rank " << rank;
    if (order && seen != nullptr) *seen = *order;
    return *request;
  }
  void finish_update() {
    ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
    for (const std::uint32_t rank : {0U, 1U}) {
      ipc::RankWeights order;
      const ipc::Envelope request = order_at(rank, WeightsPhase::kCommit, &order);
      report_weights(rank, order.weights);
      workers_[rank]->reply(request, ipc::RankWeightsReply{order.weights, 77});
    }
    ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  }
  void report_weights(std::uint32_t rank, const ipc::Digest& id) {
    ipc::RankState state = ScriptedPeer::mapped_state(rank);
    state.weights = id;
    workers_[rank]->notify(MessageKind::kRankState, state);
    (void)workers_[rank]->has(MessageKind::kRankState);  // It has been handled.
  }
  void expect_messages() {
    const auto read = workers_[0]->next(MessageKind::kRankWeightsRead);
    ASSERT_TRUE(read.has_value()) << "rank 0 was not asked for the file";
    const auto wanted = ipc::decode<ipc::RankWeightsRead>(read->body, "RankWeightsRead");
    ASSERT_TRUE(wanted.has_value());
    ipc::WeightsPart part;
    part.upload = wanted->upload;
    part.total_bytes = 4;
    part.bytes = {1, 2, 3, 4};
    workers_[0]->reply(*read, part);
    const auto handed = workers_[1]->next(MessageKind::kRankWeightsPart);
    ASSERT_TRUE(handed.has_value());
    workers_[1]->reply(*handed, ipc::Empty{});
    for (const std::uint32_t rank : {0U, 1U}) {
      ipc::RankWeights order;
      const ipc::Envelope request = order_at(rank, WeightsPhase::kPrepare, &order);
      EXPECT_TRUE(order.broadcast.empty());
      workers_[rank]->reply(request, ipc::RankWeightsReply{order.weights, 77});
    }
    ASSERT_NO_FATAL_FAILURE(finish_update());
    const auto reply = operator_->next_body<ipc::UpdateWeightsReply>(MessageKind::kUpdateWeights);
    ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
    EXPECT_EQ(reply->transport, "messages");
  }
};

TEST_F(ManagerBroadcastTest, DevicesThatReachEachOtherGetWhatRankZeroOpens) {
  ASSERT_NO_FATAL_FAILURE(start_update());
  ASSERT_NO_FATAL_FAILURE(open(kId));
  for (const std::uint32_t rank : {0U, 1U}) {
    ipc::RankWeights order;
    const ipc::Envelope request = order_at(rank, WeightsPhase::kPrepare, &order);
    EXPECT_EQ(order.broadcast, kId);
    EXPECT_EQ(order.source.location, "/new.safetensors");
    workers_[rank]->reply(request, ipc::RankWeightsReply{order.weights, 77});
  }
  ASSERT_NO_FATAL_FAILURE(finish_update());
  const auto reply = operator_->next_body<ipc::UpdateWeightsReply>(MessageKind::kUpdateWeights);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_EQ(reply->transport, "nccl 2.28.9");
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankWeightsRead));
}

TEST_F(ManagerBroadcastTest, OnlyAGroupThatAllHaveKeptIsUsedAgain) {
  const ipc::Digest kept = ipc::group_name(kId);
  const ipc::Digest other = ipc::Digest::from_words(1, 2);
  ASSERT_NO_FATAL_FAILURE(start_update());
  for (const auto& [second, again] :
       {std::pair(kept, true), std::pair(other, false), std::pair(ipc::Digest{}, false)}) {
    if (!again) ask_again();
    ASSERT_NO_FATAL_FAILURE(show_port(0, {kFirst.transport, kFirst.device, kept}));
    ASSERT_NO_FATAL_FAILURE(show_port(1, {kSecond.transport, kSecond.device, second}));
    ipc::RankBroadcast order;
    const auto request = asked_to_open(&order);
    ASSERT_TRUE(request.has_value());
    EXPECT_EQ(order.again, again);
    workers_[0]->reply_error(*request, KVFERRY_ERROR(kNotFound, "it is enough"));
    for (const std::uint32_t rank : {0U, 1U}) (void)order_at(rank, WeightsPhase::kAbandon);
    ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
    EXPECT_EQ(refusal(MessageKind::kUpdateWeights), ErrorCode::kNotFound);
  }
}

TEST_F(ManagerBroadcastTest, RanksOnOneDeviceGetMessages) {
  ASSERT_NO_FATAL_FAILURE(start_update());
  for (const std::uint32_t rank : {0U, 1U}) ASSERT_NO_FATAL_FAILURE(show_port(rank, kFirst));
  ASSERT_NO_FATAL_FAILURE(expect_messages());
}

TEST_F(ManagerBroadcastTest, RanksWithDifferentTransportsGetMessages) {
  ASSERT_NO_FATAL_FAILURE(start_update());
  ASSERT_NO_FATAL_FAILURE(show_port(0, kFirst));
  ASSERT_NO_FATAL_FAILURE(show_port(1, {"nccl 2.27.3", "gpu-1", {}}));
  ASSERT_NO_FATAL_FAILURE(expect_messages());
}

TEST_F(ManagerBroadcastTest, ARankWithoutATransportIsNoFailure) {
  ASSERT_NO_FATAL_FAILURE(start_update());
  ASSERT_NO_FATAL_FAILURE(show_port(0, kFirst));
  ASSERT_NO_FATAL_FAILURE(refuse_port(1, KVFERRY_ERROR(kNotFound, "NCCL is not there")));
  ASSERT_NO_FATAL_FAILURE(expect_messages());
}

TEST_F(ManagerBroadcastTest, ARankThatCannotBeAskedFailsTheUpdate) {
  ASSERT_NO_FATAL_FAILURE(start_update());
  ASSERT_NO_FATAL_FAILURE(show_port(0, kFirst));
  ASSERT_NO_FATAL_FAILURE(refuse_port(1, KVFERRY_ERROR(kCuda, "the device is gone")));
  for (const std::uint32_t rank : {0U, 1U}) (void)order_at(rank, WeightsPhase::kAbandon);
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kUpdateWeights), ErrorCode::kCuda);
  EXPECT_THAT(refusal_, HasSubstr("engine chat rank 1: the device is gone"));
}

TEST_F(ManagerBroadcastTest, AFileThatRankZeroCannotOpenEndsItBeforeAnyRankWaits) {
  ASSERT_NO_FATAL_FAILURE(start_update());
  ASSERT_NO_FATAL_FAILURE(show_port(0, kFirst));
  ASSERT_NO_FATAL_FAILURE(show_port(1, kSecond));
  const auto request = asked_to_open();
  ASSERT_TRUE(request.has_value());
  workers_[0]->reply_error(*request, KVFERRY_ERROR(kNotFound, "/new.safetensors is not there"));
  for (const std::uint32_t rank : {0U, 1U}) (void)order_at(rank, WeightsPhase::kAbandon);
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kUpdateWeights), ErrorCode::kNotFound);
  EXPECT_THAT(refusal_, HasSubstr("engine chat rank 0: /new.safetensors"));
}

TEST_F(ManagerBroadcastTest, AnIdThatCannotBeIsNotHandedOn) {
  ASSERT_NO_FATAL_FAILURE(start_update());
  ASSERT_NO_FATAL_FAILURE(open(BroadcastId(ipc::kMaxBroadcastId + 1, 7)));
  for (const std::uint32_t rank : {0U, 1U}) (void)order_at(rank, WeightsPhase::kAbandon);
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kUpdateWeights), ErrorCode::kProtocol);
}

// They would wait for the failed one until the deadline.
TEST_F(ManagerBroadcastTest, TheOthersAreToldOfAFailureBeforeTheyAnswer) {
  ASSERT_NO_FATAL_FAILURE(start_update());
  ASSERT_NO_FATAL_FAILURE(open(kId));
  const ipc::Envelope first = order_at(0, WeightsPhase::kPrepare);
  const ipc::Envelope second = order_at(1, WeightsPhase::kPrepare);
  workers_[1]->reply_error(second, KVFERRY_ERROR(kNoDeviceMemory, "no room"));
  const ipc::Envelope abandon = order_at(0, WeightsPhase::kAbandon);
  workers_[0]->reply_error(first, KVFERRY_ERROR(kCancelled, "it was given up"));
  workers_[0]->reply(abandon, ipc::RankWeightsReply{});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kUpdateWeights), ErrorCode::kNoDeviceMemory) << "the cause";
  EXPECT_THAT(refusal_, HasSubstr("rank 1"));
}

}  // namespace
}  // namespace kvferry::test
