// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Weights: their identity in every key, and their update on all ranks.
#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "multiproc/manager/manager_generation_fixture.hpp"

#include <gmock/gmock.h>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::Digest;
using ipc::GroupId;
using ipc::WeightsPhase;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::HasSubstr;

class ManagerWeightsTest : public ManagerGenerationTest {
 protected:
  [[nodiscard]] static Digest weights(std::uint64_t number) {
    return Digest::from_words(0xEE, number);
  }
  void report(std::uint32_t rank, const Digest& id) {
    ipc::RankState state = ScriptedPeer::mapped_state(rank);
    state.weights = id;
    workers_[rank]->notify(MessageKind::kRankState, state);
    (void)workers_[rank]->has(MessageKind::kRankState);  // It has been handled.
  }
  void await_weights(const Digest& id) {
    while (state_.weights != id) {
      const auto event = client_->next_body<ipc::EngineState>(MessageKind::kEngineState);
      ASSERT_TRUE(event.has_value()) << "the client was not told";
      state_ = *event;
    }
  }
  /// The rank's worker gets the order; it answers as told.
  void answer_weights(std::uint32_t rank, WeightsPhase phase, const ipc::Error* error = nullptr) {
    const auto request = workers_[rank]->next(MessageKind::kRankWeights);
    ASSERT_TRUE(request.has_value()) << "rank " << rank << " was not asked";
    const auto order = ipc::decode<ipc::RankWeights>(request->body, "RankWeights");
    ASSERT_TRUE(order.has_value());
    EXPECT_EQ(order->phase, phase);
    if (error != nullptr) {
      workers_[rank]->reply_error(*request, *error);
      return;
    }
    if (phase == WeightsPhase::kCommit) report(rank, order->weights);
    workers_[rank]->reply(*request, ipc::RankWeightsReply{order->weights, 77});
  }
  void answer_all(WeightsPhase phase) {
    for (const std::uint32_t rank : {0U, 1U}) answer_weights(rank, phase);
  }
  void ask_update(bool flush = true,
                  std::optional<Digest> id = {},
                  std::chrono::milliseconds timeout = {}) {
    ipc::UpdateWeightsRequest request;
    request.timeout = timeout;
    request.engine = "chat";
    request.source.location = "/new.safetensors";
    request.flush_cache = flush;
    request.weights = id;
    operator_->ask(MessageKind::kUpdateWeights, request);
  }
  [[nodiscard]] ErrorCode refusal() {
    return ManagerGenerationTest::refusal(MessageKind::kUpdateWeights);
  }
};

TEST_F(ManagerWeightsTest, NothingOfOtherWeightsIsFoundUntilTheyComeBack) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  for (const std::uint32_t rank : {0U, 1U}) report(rank, weights(1));
  ASSERT_NO_FATAL_FAILURE(await_weights(weights(1)));
  store(5, 1);
  ASSERT_EQ(presence_of(5), BlockPresence::kHit);
  for (const std::uint32_t rank : {0U, 1U}) report(rank, weights(2));
  ASSERT_NO_FATAL_FAILURE(await_weights(weights(2)));
  EXPECT_EQ(presence_of(5), BlockPresence::kMiss);
  submit_load(2, {{GroupId{0}, BlockId{5}, key(5)}});
  EXPECT_THAT(wait_done().results, testing::ElementsAre(code(ErrorCode::kNotFound)));
  for (const std::uint32_t rank : {0U, 1U}) report(rank, weights(1));
  ASSERT_NO_FATAL_FAILURE(await_weights(weights(1)));
  EXPECT_EQ(presence_of(5), BlockPresence::kHit) << "the old identity finds its blocks again";
}

TEST_F(ManagerWeightsTest, RanksThatLoadedForThemselvesAreAnIdentityOfTheirOwn) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  report(0, weights(1));
  report(1, weights(2));
  const std::string both = status()["engines"][0]["weights"];
  EXPECT_NE(both, weights(1).hex());
  EXPECT_NE(both, weights(2).hex());
  report(0, weights(2));
  EXPECT_EQ(status()["engines"][0]["weights"], weights(2).hex()) << "one on all ranks is itself";
  report(0, weights(3));  // Another life of that worker.
  EXPECT_NE(status()["engines"][0]["weights"], both);
}

TEST_F(ManagerWeightsTest, AnUpdateThatMayWaitLoadsNothingBeforeTheEngineIsIdle) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_update(/*flush=*/true, weights(3), 600s);
  const Order order = next_order(*client_);
  EXPECT_EQ(order.schedule.order, ScheduleOrder::kIdle);
  EXPECT_TRUE(order.schedule.wait);
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankWeights));
  client_->reply(order.request, ipc::SchedulerLoad{});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kPrepare));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kCommit));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  const auto reply = operator_->next_body<ipc::UpdateWeightsReply>(MessageKind::kUpdateWeights);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_EQ(reply->weights, weights(3));
}

TEST_F(ManagerWeightsTest, AnUpdateWhoseTimeToWaitIsOverChangesNothing) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_update(/*flush=*/true, {}, 50ms);
  const Order order = next_order(*client_);
  const Order now = next_order(*client_);
  EXPECT_FALSE(now.schedule.wait);
  client_->reply_error(order.request, KVFERRY_ERROR(kNotIdle, "still 1 request runs"));
  client_->reply_error(now.request, KVFERRY_ERROR(kNotIdle, "still 1 request runs"));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(), ErrorCode::kNotIdle);
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankWeights));
}

TEST_F(ManagerWeightsTest, BlocksOfEarlierWeightsAreNotStored) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  for (const std::uint32_t rank : {0U, 1U}) report(rank, weights(1));
  const auto late = client_->call<ipc::ReserveStoreReply>(
      MessageKind::kReserveStore, ipc::ReserveStore{{{GroupId{0}, key(1)}}, state_.weights});
  ASSERT_FALSE(late.has_value());
  EXPECT_EQ(late.error().code, ErrorCode::kStaleEpoch);
  EXPECT_THAT(late.error().message, HasSubstr(weights(1).hex()));
}

TEST_F(ManagerWeightsTest, AnUpdateIsPreparedEverywhereBeforeAnyRankChanges) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_update(true, weights(9));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(answer_weights(0, WeightsPhase::kPrepare));
  (void)workers_[0]->has(MessageKind::kRankWeights);  // Its answer has been handled.
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankWeights)) << "rank 1 is not ready yet";
  ASSERT_NO_FATAL_FAILURE(answer_weights(1, WeightsPhase::kPrepare));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kCommit));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  const auto reply = operator_->next_body<ipc::UpdateWeightsReply>(MessageKind::kUpdateWeights);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_EQ(reply->weights, weights(9));
  ASSERT_EQ(reply->updates.size(), 2U);
  EXPECT_EQ(reply->updates[1].bytes, 77U);
  EXPECT_EQ(status()["engines"][0]["updates"], 1);
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankEmpty)) << "an update empties nothing by default";
}

TEST_F(ManagerWeightsTest, AWorkerThatIsGoneAfterItPreparedLeavesAllAsTheyWere) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  for (const std::uint32_t rank : {0U, 1U}) report(rank, weights(1));
  ask_update();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(answer_weights(0, WeightsPhase::kPrepare));
  (void)workers_[0]->has(MessageKind::kRankWeights);
  workers_[0].reset();  // Away: nothing it prepared counts any more.
  ASSERT_TRUE(wait_state(ipc::CachePhase::kDetached, false));
  ASSERT_NO_FATAL_FAILURE(answer_weights(1, WeightsPhase::kPrepare));
  ASSERT_NO_FATAL_FAILURE(answer_weights(1, WeightsPhase::kAbandon));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(), ErrorCode::kPeerDied);
  EXPECT_EQ(status()["engines"][0]["paused"], nullptr);
}

TEST_F(ManagerWeightsTest, UnderAPauseInPlaceNobodyIsAskedToForget) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  operator_->ask(MessageKind::kPause, ipc::PauseRequest{"chat", PauseMode::kInPlace});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kInPlace));
  ASSERT_TRUE(operator_->next(MessageKind::kPause).has_value());
  ask_update(/*flush=*/false);
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kInPlace));  // Is it in effect?
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kPrepare));
  EXPECT_FALSE(client_->has(MessageKind::kSchedule));
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kCommit));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kInPlace));
  const auto reply = operator_->next_body<ipc::UpdateWeightsReply>(MessageKind::kUpdateWeights);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_FALSE(reply->weights.is_zero()) << "always others, flushed or not";
  EXPECT_EQ(status()["engines"][0]["paused"], "in_place");
}

TEST_F(ManagerWeightsTest, ABusyEngineIsRefusedBeforeAnythingIsLoaded) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  for (const bool flush : {true, false}) {
    ask_update(flush);
    const auto request = client_->next(MessageKind::kSchedule);
    ASSERT_TRUE(request.has_value());
    client_->reply_error(*request, KVFERRY_ERROR(kNotIdle, "3 requests run"));
    ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
    EXPECT_EQ(refusal(), ErrorCode::kNotIdle);
    EXPECT_FALSE(workers_[0]->has(MessageKind::kRankWeights));
  }
}

TEST_F(ManagerWeightsTest, ARankThatCannotPrepareLeavesAllAsTheyWere) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  for (const std::uint32_t rank : {0U, 1U}) report(rank, weights(1));
  ask_update();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  const ipc::Error missing = KVFERRY_ERROR(kNotFound, "/new.safetensors is not there");
  ASSERT_NO_FATAL_FAILURE(answer_weights(0, WeightsPhase::kPrepare));
  ASSERT_NO_FATAL_FAILURE(answer_weights(1, WeightsPhase::kPrepare, &missing));
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kAbandon));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(), ErrorCode::kNotFound);
  EXPECT_THAT(refusal_, HasSubstr("engine chat rank 1: /new.safetensors"));
  EXPECT_EQ(status()["engines"][0]["weights"], weights(1).hex());
}

TEST_F(ManagerWeightsTest, ACommitThatFailsOnOneRankKeepsEverybodyFromComputing) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_update();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kPrepare));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  const ipc::Error broken = KVFERRY_ERROR(kCuda, "the device is gone");
  ASSERT_NO_FATAL_FAILURE(answer_weights(0, WeightsPhase::kCommit));
  ASSERT_NO_FATAL_FAILURE(answer_weights(1, WeightsPhase::kCommit, &broken));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  EXPECT_EQ(refusal(), ErrorCode::kCuda);
  EXPECT_EQ(status()["engines"][0]["paused"], "retract");
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  const auto kept = operator_->next(MessageKind::kContinue);
  ASSERT_TRUE(kept && kept->error);
  EXPECT_EQ(kept->error->code, ErrorCode::kNotReady);
  EXPECT_THAT(kept->error->message, HasSubstr("update them again"));

  ask_update();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kPrepare));
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kCommit));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  ASSERT_TRUE(operator_->next_body<ipc::UpdateWeightsReply>(MessageKind::kUpdateWeights));
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat", /*empty_cache=*/false});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_TRUE(operator_->next_body<ipc::ContinueReply>(MessageKind::kContinue).has_value());
}

TEST_F(ManagerWeightsTest, AClearTakesThePlaceOfAnUpdateThatIsNotCommittedYet) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_update();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  const auto prepares = workers_[0]->next(MessageKind::kRankWeights);
  ASSERT_TRUE(prepares.has_value());
  auto second = peer(ipc::ProcessKind::kOperator, "second");
  second->ask(MessageKind::kClear, ipc::ClearRequest{"chat"});
  EXPECT_EQ(refusal(), ErrorCode::kCancelled);
  ASSERT_NO_FATAL_FAILURE(answer_weights(0, WeightsPhase::kAbandon));
  EXPECT_TRUE(workers_[0]->next(MessageKind::kRankClear).has_value());
}

TEST_F(ManagerWeightsTest, WhatIsPreparedIsLetGoOfWhenAClearComesBeforeTheCommit) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_update();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kPrepare));
  ASSERT_TRUE(client_->next(MessageKind::kSchedule).has_value());  // Held for the commit.
  auto second = peer(ipc::ProcessKind::kOperator, "second");
  second->ask(MessageKind::kClear, ipc::ClearRequest{"chat"});
  EXPECT_EQ(refusal(), ErrorCode::kCancelled);
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kAbandon));
  EXPECT_TRUE(workers_[0]->next(MessageKind::kRankClear).has_value());
}

TEST_F(ManagerWeightsTest, WeightsThatAreBeingCommittedAreNotLeftHalfWay) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_update();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(answer_all(WeightsPhase::kPrepare));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  ASSERT_NO_FATAL_FAILURE(answer_weights(0, WeightsPhase::kCommit));
  auto second = peer(ipc::ProcessKind::kOperator, "second");
  const auto clear = second->call<ipc::ClearReply>(MessageKind::kClear, ipc::ClearRequest{"chat"});
  ASSERT_FALSE(clear.has_value());
  EXPECT_EQ(clear.error().code, ErrorCode::kBusy);
  ASSERT_NO_FATAL_FAILURE(answer_weights(1, WeightsPhase::kCommit));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_TRUE(operator_->next_body<ipc::UpdateWeightsReply>(MessageKind::kUpdateWeights));
}

class ManagerUploadTest : public ManagerWeightsTest {
 protected:
  static ipc::WeightsPart part(std::uint64_t offset, std::size_t size) {
    ipc::WeightsPart part;
    part.engine = "chat";
    part.upload = weights(7);
    part.offset = offset;
    part.total_bytes = 100;
    part.bytes.assign(size, std::uint8_t{5});
    return part;
  }
  std::optional<ipc::Envelope> at_rank(std::uint32_t rank) {
    return workers_[rank]->next(MessageKind::kRankWeightsPart);
  }
};

TEST_F(ManagerUploadTest, APartIsAnsweredWhenEveryRankHasIt) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  operator_->ask(MessageKind::kWeightsPart, part(40, 60));
  for (const std::uint32_t rank : {0U, 1U}) {
    const auto request = at_rank(rank);
    ASSERT_TRUE(request.has_value());
    const auto passed = ipc::decode<ipc::WeightsPart>(request->body, "WeightsPart");
    ASSERT_TRUE(passed.has_value());
    EXPECT_EQ(passed->upload, weights(7));
    EXPECT_EQ(passed->offset, 40U);
    EXPECT_EQ(passed->total_bytes, 100U);
    EXPECT_EQ(passed->bytes, part(40, 60).bytes);
    EXPECT_FALSE(operator_->has(MessageKind::kWeightsPart)) << "before rank " << rank;
    workers_[rank]->reply(*request, ipc::Empty{});
  }
  EXPECT_TRUE(operator_->next_body<ipc::Empty>(MessageKind::kWeightsPart).has_value());
}

TEST_F(ManagerUploadTest, TheFirstRankThatDoesNotTakeItIsNamed) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  operator_->ask(MessageKind::kWeightsPart, part(0, 50));
  const auto first = at_rank(0);
  const auto second = at_rank(1);
  ASSERT_TRUE(first && second);
  workers_[1]->reply_error(*second, KVFERRY_ERROR(kNoHostMemory, "no room for 100 bytes"));
  workers_[0]->reply(*first, ipc::Empty{});
  const auto reply = operator_->next(MessageKind::kWeightsPart);
  ASSERT_TRUE(reply && reply->error);
  EXPECT_EQ(reply->error->code, ErrorCode::kNoHostMemory);
  EXPECT_THAT(reply->error->message, HasSubstr("rank 1"));
}

TEST_F(ManagerUploadTest, PartsThatNoImageHasGoToNoRank) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ipc::WeightsPart nameless = part(0, 100);
  nameless.upload = {};
  for (const ipc::WeightsPart& bad : {part(50, 51), part(101, 0), part(10, 0), nameless}) {
    const auto refused = operator_->call<ipc::Empty>(MessageKind::kWeightsPart, bad);
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument) << refused.error().message;
  }
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankWeightsPart));
}

TEST_F(ManagerUploadTest, WhatASenderHadBegunIsForgottenWhenItGoes) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  auto sender = peer(ipc::ProcessKind::kOperator, "sender");
  sender->ask(MessageKind::kWeightsPart, part(0, 50));
  for (const std::uint32_t rank : {0U, 1U}) {
    const auto request = at_rank(rank);
    ASSERT_TRUE(request.has_value());
    workers_[rank]->reply(*request, ipc::Empty{});
  }
  ASSERT_TRUE(sender->next_body<ipc::Empty>(MessageKind::kWeightsPart).has_value());
  sender.reset();
  for (const std::uint32_t rank : {0U, 1U}) {
    const auto request = at_rank(rank);
    ASSERT_TRUE(request.has_value()) << "rank " << rank << " was not told";
    const auto passed = ipc::decode<ipc::WeightsPart>(request->body, "WeightsPart");
    ASSERT_TRUE(passed.has_value());
    EXPECT_EQ(passed->upload, weights(7));
    EXPECT_EQ(passed->total_bytes, 0U);
  }
}

TEST_F(ManagerUploadTest, NothingIsSentWhileAnUpdateRuns) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_update();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  auto second = peer(ipc::ProcessKind::kOperator, "second");
  const auto busy = second->call<ipc::Empty>(MessageKind::kWeightsPart, part(0, 50));
  ASSERT_FALSE(busy.has_value());
  EXPECT_EQ(busy.error().code, ErrorCode::kBusy);
}

}  // namespace
}  // namespace kvferry::test
