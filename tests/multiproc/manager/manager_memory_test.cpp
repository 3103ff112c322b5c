// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Releases and resumes of memory that go wrong: a real manager between scripted schedulers, workers
// and operators.
#include "multiproc/manager/manager_generation_fixture.hpp"

#include <csignal>

namespace kvferry::test {
namespace {

using ipc::MemoryTag;
using ipc::MemoryTags;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr MemoryTags kBeside{MemoryTag::kWeights, MemoryTag::kScratch};

class ManagerMemoryTest : public ManagerGenerationTest {
 protected:
  void ask_release(MemoryTags tags = kBeside, std::chrono::milliseconds timeout = {}) {
    ipc::ReleaseRequest request;
    request.engine = "chat";
    request.tags = tags;
    request.timeout = timeout;
    operator_->ask(MessageKind::kReleaseMemory, request);
  }
  void ask_resume(MemoryTags tags = {}) {
    ipc::ResumeRequest request;
    request.engine = "chat";
    request.tags = tags;
    operator_->ask(MessageKind::kResumeMemory, request);
  }
  /// Up to the orders to the ranks.
  void hold() {
    ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
    ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  }
  /// The rank's worker reports and answers; or it fails.
  void answer(std::uint32_t rank, MessageKind kind, MemoryTags now, bool fails = false) {
    const auto request = workers_[rank]->next(kind);
    ASSERT_TRUE(request.has_value()) << "rank " << rank << " was not asked";
    report_released(rank, now);
    if (fails) {
      workers_[rank]->reply_error(*request, KVFERRY_ERROR(kNoDeviceMemory, "there is none"));
    } else {
      ipc::RankReleaseReply reply;
      reply.released = now;
      reply.weights_bytes = 100 + rank;
      workers_[rank]->reply(*request, reply);
    }
  }
  template <typename Reply> std::pair<ipc::Error, Reply> failed(MessageKind kind) {
    const auto answer = operator_->next(kind);
    if (!answer || !answer->error) {
      ADD_FAILURE() << "it did not fail";
      return {};
    }
    return {*answer->error, ipc::decode<Reply>(answer->body, "reply").value_or(Reply{})};
  }
  /// Rank 1's, as the manager sees it.
  void lose_worker() {
    workers_[1].reset();
    const ipc::Deadline deadline = soon();
    while (engine()["ranks"][1]["worker"]["connected"] == true) {
      ASSERT_FALSE(deadline.expired()) << engine().dump();
    }
  }
  [[nodiscard]] nlohmann::json engine() { return status()["engines"][0]; }
};

TEST_F(ManagerMemoryTest, IsAnsweredWhenEveryRankHasReleasedAndHoldsTheEngine) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_release();
  ASSERT_NO_FATAL_FAILURE(hold());
  ASSERT_NO_FATAL_FAILURE(answer(0, MessageKind::kRankRelease, kBeside));
  EXPECT_FALSE(operator_->has(MessageKind::kReleaseMemory)) << "rank 1 has not";
  ASSERT_NO_FATAL_FAILURE(answer(1, MessageKind::kRankRelease, kBeside));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  const auto reply = operator_->next_body<ipc::ReleaseReply>(MessageKind::kReleaseMemory);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_EQ(reply->released, kBeside);
  ASSERT_EQ(reply->ranks.size(), 2U);
  EXPECT_EQ(reply->ranks[1].outcome.weights_bytes, 101U);
  EXPECT_TRUE(reply->cleared.empty());
  EXPECT_EQ(engine()["paused"], "retract");
  EXPECT_EQ(engine()["phase"], "ready") << "the cache was not asked for";
  // One by one, and then it runs again by itself.
  ask_resume({MemoryTag::kScratch});
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankResume, {MemoryTag::kWeights}));
  }
  auto resumed = operator_->next_body<ipc::ResumeReply>(MessageKind::kResumeMemory);
  ASSERT_TRUE(resumed.has_value()) << resumed.error().to_string();
  EXPECT_EQ(resumed->released, MemoryTags{MemoryTag::kWeights});
  EXPECT_TRUE(resumed->paused.has_value());
  ask_resume();
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankResume, {}));
  }
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  resumed = operator_->next_body<ipc::ResumeReply>(MessageKind::kResumeMemory);
  ASSERT_TRUE(resumed.has_value()) << resumed.error().to_string();
  EXPECT_FALSE(resumed->paused.has_value());
  EXPECT_EQ(engine()["paused"], nullptr);
}

TEST_F(ManagerMemoryTest, AReleaseThatMayWaitIsCarriedOutOnceTheEngineIsIdle) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_release(kBeside, 600s);
  const Order order = next_order(*client_);
  EXPECT_EQ(order.schedule.order, ScheduleOrder::kIdle);
  EXPECT_TRUE(order.schedule.wait);
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankRelease)) << "it is not idle yet";
  client_->reply(order.request, ipc::SchedulerLoad{});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankRelease, kBeside));
  }
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  EXPECT_TRUE(operator_->next_body<ipc::ReleaseReply>(MessageKind::kReleaseMemory).has_value());
}

TEST_F(ManagerMemoryTest, AReleaseWhoseTimeToWaitIsOverChangesNothing) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_release(MemoryTags::all(), 50ms);
  const Order order = next_order(*client_);
  EXPECT_TRUE(order.schedule.wait);
  const Order now = next_order(*client_);
  EXPECT_EQ(now.schedule.order, ScheduleOrder::kIdle);
  EXPECT_FALSE(now.schedule.wait);
  client_->reply_error(order.request, KVFERRY_ERROR(kNotIdle, "still 1 request runs"));
  client_->reply_error(now.request, KVFERRY_ERROR(kNotIdle, "still 1 request runs"));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kReleaseMemory), ErrorCode::kNotIdle);
  EXPECT_THAT(refusal_, HasSubstr("still 1"));
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankRelease));
  EXPECT_EQ(engine()["paused"], nullptr);
}

TEST_F(ManagerMemoryTest, TimesThatNobodyCanMeanAreRefused) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  for (const std::chrono::milliseconds timeout : {-1ms, 600'001ms}) {
    ask_release(kBeside, timeout);
    EXPECT_EQ(refusal(MessageKind::kReleaseMemory), ErrorCode::kInvalidArgument);
    EXPECT_THAT(refusal_, HasSubstr("release timeout of"));
    ipc::UpdateWeightsRequest update;
    update.engine = "chat";
    update.source.location = "/new.safetensors";
    update.timeout = timeout;
    operator_->ask(MessageKind::kUpdateWeights, update);
    EXPECT_EQ(refusal(MessageKind::kUpdateWeights), ErrorCode::kInvalidArgument);
    EXPECT_THAT(refusal_, HasSubstr("update timeout of"));
    operator_->ask(MessageKind::kFlush,
                   ipc::FlushRequest{"chat", true, ipc::HostPolicy::kDrop, timeout});
    EXPECT_EQ(refusal(MessageKind::kFlush), ErrorCode::kInvalidArgument);
  }
}

TEST_F(ManagerMemoryTest, AWorkerThatGoesWhileAReleaseWaitsIsMissedBeforeAnythingIsReleased) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_release(MemoryTags::all(), 600s);
  const Order order = next_order(*client_);
  ASSERT_NO_FATAL_FAILURE(lose_worker());
  client_->reply(order.request, ipc::SchedulerLoad{});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kReleaseMemory), ErrorCode::kNotReady);
  EXPECT_THAT(refusal_, HasSubstr("nothing was released"));
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankRelease));
}

TEST_F(ManagerMemoryTest, ARankThatFailsIsNamedAndTheOthersStayReleased) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_release();
  ASSERT_NO_FATAL_FAILURE(hold());
  ASSERT_NO_FATAL_FAILURE(answer(0, MessageKind::kRankRelease, kBeside));
  ASSERT_NO_FATAL_FAILURE(answer(1, MessageKind::kRankRelease, {}, /*fails=*/true));
  const auto [error, reply] = failed<ipc::ReleaseReply>(MessageKind::kReleaseMemory);
  EXPECT_THAT(error.message, HasSubstr("engine chat rank 1: there is none"));
  ASSERT_EQ(reply.ranks.size(), 2U);
  EXPECT_FALSE(reply.ranks[0].error.has_value());
  EXPECT_TRUE(reply.ranks[1].error.has_value());
  EXPECT_EQ(reply.released, kBeside);
  EXPECT_EQ(engine()["paused"], "retract") << "rank 0 could not compute";
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  EXPECT_EQ(refusal(MessageKind::kContinue), ErrorCode::kNotReady);
  EXPECT_THAT(refusal_, HasSubstr("weights, scratch is released"));
  operator_->ask(MessageKind::kUpdateWeights, ipc::UpdateWeightsRequest{});
  EXPECT_EQ(refusal(MessageKind::kUpdateWeights), ErrorCode::kNotReady);
}

TEST_F(ManagerMemoryTest, WhenNothingWasReleasedTheEngineRunsOn) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_release();
  ASSERT_NO_FATAL_FAILURE(hold());
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankRelease, {}, /*fails=*/true));
  }
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kReleaseMemory), ErrorCode::kNoDeviceMemory);
  EXPECT_EQ(engine()["paused"], nullptr);
}

TEST_F(ManagerMemoryTest, AfterAFailureTheCacheStaysAndWhatWasReleasedIsGivenBack) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_release(MemoryTags::all());
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  ASSERT_NO_FATAL_FAILURE(answer(0, MessageKind::kRankRelease, kBeside));
  ASSERT_NO_FATAL_FAILURE(answer(1, MessageKind::kRankRelease, {}, /*fails=*/true));
  ASSERT_NO_FATAL_FAILURE(empty(EmptyReason::kRelease));
  EXPECT_EQ(refusal(MessageKind::kReleaseMemory), ErrorCode::kNoDeviceMemory);
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankClear));
  EXPECT_EQ(engine()["phase"], "ready");
}

// A worker that was replaced while the cache was cleared, or waits for its first memory.
TEST_F(ManagerMemoryTest, AWorkerWithNothingMappedIsEmptiedAsWell) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ipc::RankState nothing;
  nothing.session = ScriptedPeer::session_of(1);
  workers_[1]->notify(MessageKind::kRankState, nothing);
  (void)workers_[1]->has(MessageKind::kRankState);  // It has been handled.
  ask_release(MemoryTags::all());
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  ASSERT_NO_FATAL_FAILURE(answer(0, MessageKind::kRankRelease, kBeside));
  const auto release = workers_[1]->next(MessageKind::kRankRelease);
  ASSERT_TRUE(release.has_value());
  workers_[1]->reply(*release, ipc::RankReleaseReply{});
  for (ScriptedPeer* told : {&*workers_[0], &*movers_[0], &*movers_[1]}) {
    const auto clear = told->next(MessageKind::kRankClear);
    ASSERT_TRUE(clear.has_value());
    told->reply(*clear, ipc::RankClearReply{});
  }
  const auto empty = workers_[1]->next(MessageKind::kRankEmpty);
  ASSERT_TRUE(empty.has_value()) << "what it gave up stays in its allocator's cache";
  const auto order = ipc::decode<ipc::RankEmpty>(empty->body, "RankEmpty");
  EXPECT_TRUE(order && order->reason == EmptyReason::kRelease);
  EXPECT_FALSE(operator_->has(MessageKind::kReleaseMemory)) << "rank 1 has not emptied";
  workers_[1]->reply(*empty, ipc::AllocatorMemory{});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  const auto reply = operator_->next_body<ipc::ReleaseReply>(MessageKind::kReleaseMemory);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankEmpty)) << "its clear has done it";
  EXPECT_FALSE(workers_[1]->has(MessageKind::kRankClear));
}

TEST_F(ManagerMemoryTest, ARankThatDiesInTheMiddleIsNamed) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ASSERT_NO_FATAL_FAILURE(lose_worker());  // For a process that can be killed.
  auto worker = peer_child("worker", 1);
  ASSERT_TRUE(worker.wait_line("ready", soon()));
  ASSERT_EQ(engine()["ranks"][1]["worker"]["pid"], worker.pid());
  ask_release();
  ASSERT_NO_FATAL_FAILURE(hold());
  ASSERT_NO_FATAL_FAILURE(answer(0, MessageKind::kRankRelease, kBeside));
  worker.kill();
  EXPECT_EQ(refusal(MessageKind::kReleaseMemory), ErrorCode::kPeerDied);
  EXPECT_THAT(refusal_, HasSubstr("rank 1"));
  EXPECT_EQ(engine()["paused"], "retract");
}

TEST_F(ManagerMemoryTest, AClearTakesItsPlaceUntilTheRanksHaveBegun) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_release();
  ASSERT_NO_FATAL_FAILURE(hold());
  ASSERT_TRUE(workers_[0]->next(MessageKind::kRankRelease).has_value());
  auto second = peer(ProcessKind::kOperator, "second");
  second->ask(MessageKind::kClear, ipc::ClearRequest{"chat"});
  const auto busy = second->next(MessageKind::kClear);
  ASSERT_TRUE(busy && busy->error);
  EXPECT_EQ(busy->error->code, ErrorCode::kBusy);
  EXPECT_FALSE(operator_->has(MessageKind::kReleaseMemory)) << "it goes on";
}

TEST_F(ManagerMemoryTest, AManagerThatEndsMeanwhileAnswers) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  report_released({MemoryTag::kWeights});
  ask_resume();
  ASSERT_TRUE(workers_[0]->next(MessageKind::kRankResume).has_value());
  manager_->signal(SIGTERM);
  EXPECT_EQ(refusal(MessageKind::kResumeMemory), ErrorCode::kCancelled);
  EXPECT_THAT(refusal_, HasSubstr("the ranks finish what they were told"));
  EXPECT_EQ(manager_->wait(soon()), ChildExit::exited(0));
}

TEST_F(ManagerMemoryTest, WhatCannotBeReleasedOrResumedIsRefusedBeforeAnythingIsAsked) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_resume();
  EXPECT_EQ(refusal(MessageKind::kResumeMemory), ErrorCode::kNotReleased);
  report_released({MemoryTag::kScratch});
  ask_resume({MemoryTag::kWeights});
  EXPECT_EQ(refusal(MessageKind::kResumeMemory), ErrorCode::kNotReleased);
  EXPECT_THAT(refusal_, HasSubstr("weights is not released (scratch is)"));
  // Bits that this version does not know.
  ipc::ResumeRequest strange;
  std::uint8_t bits = 0x80;
  strange.tags = ipc::decode<MemoryTags>(ipc::encode(ipc::CancelJob{ipc::JobId{bits}}), "tags")
                     .value_or(MemoryTags{});
  operator_->ask(MessageKind::kResumeMemory, strange);
  EXPECT_EQ(refusal(MessageKind::kResumeMemory), ErrorCode::kInvalidArgument);
  EXPECT_THAT(refusal_, HasSubstr("memory tags 0x80"));
  ASSERT_NO_FATAL_FAILURE(lose_worker());
  ask_release();
  EXPECT_EQ(refusal(MessageKind::kReleaseMemory), ErrorCode::kNotReady);
  EXPECT_THAT(refusal_, HasSubstr("rank 1: its worker is not there"));
}

TEST_F(ManagerMemoryTest, AnotherManagerLearnsOfItFromTheRanks) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  report_released({MemoryTag::kWeights});
  EXPECT_THAT(engine()["released"].get<std::vector<std::string>>(), ElementsAre("weights"));
  // Unless its scheduler says so, it is not known whether anything runs.
  ASSERT_NO_FATAL_FAILURE(say_hello(*client_, PauseMode::kRetract));
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  EXPECT_EQ(refusal(MessageKind::kContinue), ErrorCode::kNotReady);
  ask_resume();
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankResume, {}));
  }
  const auto resumed = operator_->next_body<ipc::ResumeReply>(MessageKind::kResumeMemory);
  ASSERT_TRUE(resumed.has_value()) << resumed.error().to_string();
  EXPECT_EQ(resumed->paused, PauseMode::kRetract) << "it was in force before the release";
}

// Its schedulers say whose pause it is.
TEST_F(ManagerMemoryTest, AnotherManagersLastResumeEndsThePauseThatTheReleaseMade) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  report_released({MemoryTag::kWeights});
  ASSERT_NO_FATAL_FAILURE(say_hello(*client_, PauseMode::kRetract, /*paused_by_release=*/true));
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  EXPECT_EQ(refusal(MessageKind::kContinue), ErrorCode::kNotReady);
  ask_resume();
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankResume, {}));
  }
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  const auto resumed = operator_->next_body<ipc::ResumeReply>(MessageKind::kResumeMemory);
  ASSERT_TRUE(resumed.has_value()) << resumed.error().to_string();
  EXPECT_FALSE(resumed->paused.has_value());
}

// It died before all of them had heard of it.
TEST_F(ManagerMemoryTest, APauseThatSomeSchedulersTookForTheReleasesStaysTheUsers) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  report_released({MemoryTag::kWeights});
  ASSERT_NO_FATAL_FAILURE(say_hello(*client_, PauseMode::kRetract, /*paused_by_release=*/true));
  auto other = peer(ProcessKind::kEngine, "other");
  ASSERT_NO_FATAL_FAILURE(say_hello(*other, PauseMode::kRetract));
  const Order told = next_order(*client_);
  EXPECT_EQ(told.schedule.order, ScheduleOrder::kRetract);
  EXPECT_FALSE(told.schedule.for_release);
  client_->reply(told.request, ipc::SchedulerLoad{});
  EXPECT_FALSE(other->has(MessageKind::kSchedule)) << "it knows";
  ask_resume();
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankResume, {}));
  }
  const auto resumed = operator_->next_body<ipc::ResumeReply>(MessageKind::kResumeMemory);
  ASSERT_TRUE(resumed.has_value()) << resumed.error().to_string();
  EXPECT_EQ(resumed->paused, PauseMode::kRetract);
  EXPECT_FALSE(client_->has(MessageKind::kSchedule)) << "it is held on";
}

// One that comes while the last resume lets the others run holds them again.
TEST_F(ManagerMemoryTest, AUsersPauseThatComesToLightInTheLastResumeOutlivesIt) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  report_released({MemoryTag::kWeights});
  ASSERT_NO_FATAL_FAILURE(say_hello(*client_, PauseMode::kRetract, /*paused_by_release=*/true));
  ask_resume();
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankResume, {}));
  }
  const Order run = next_order(*client_);
  EXPECT_EQ(run.schedule.order, ScheduleOrder::kRun);
  auto other = peer(ProcessKind::kEngine, "other");
  ASSERT_NO_FATAL_FAILURE(say_hello(*other, PauseMode::kRetract));
  client_->reply(run.request, ipc::SchedulerLoad{});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  const auto resumed = operator_->next_body<ipc::ResumeReply>(MessageKind::kResumeMemory);
  ASSERT_TRUE(resumed.has_value()) << resumed.error().to_string();
  EXPECT_EQ(resumed->paused, PauseMode::kRetract);
  EXPECT_EQ(engine()["paused"], "retract");
}

// No resume ends a pause under which weights of the ranks may not belong together, of this manager
// or of the next one, should this one die in the middle.
TEST_F(ManagerMemoryTest, ACommitThatFailsMakesTheReleasesPauseOneThatStays) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_release({MemoryTag::kScratch});
  ASSERT_NO_FATAL_FAILURE(hold());
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankRelease, {MemoryTag::kScratch}));
  }
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  ASSERT_TRUE(operator_->next_body<ipc::ReleaseReply>(MessageKind::kReleaseMemory).has_value());
  ipc::UpdateWeightsRequest update;
  update.engine = "chat";
  update.source.location = "/new.safetensors";
  update.flush_cache = false;
  operator_->ask(MessageKind::kUpdateWeights, update);
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  const auto answer_weights = [this](bool fails) {
    for (const std::uint32_t rank : {0U, 1U}) {
      const auto request = workers_[rank]->next(MessageKind::kRankWeights);
      ASSERT_TRUE(request.has_value()) << "rank " << rank << " was not asked";
      if (fails) {
        workers_[rank]->reply_error(*request, KVFERRY_ERROR(kCuda, "the device is gone"));
      } else {
        workers_[rank]->reply(*request, ipc::RankWeightsReply{{}, 77});
      }
    }
  };
  ASSERT_NO_FATAL_FAILURE(answer_weights(false));
  Order held = next_order(*client_);
  EXPECT_EQ(held.schedule.order, ScheduleOrder::kRetract);
  EXPECT_FALSE(held.schedule.for_release) << "the next manager would let it run";
  client_->reply(held.request, ipc::SchedulerLoad{});
  ASSERT_NO_FATAL_FAILURE(answer_weights(true));
  held = next_order(*client_);
  EXPECT_FALSE(held.schedule.for_release);
  EXPECT_EQ(refusal(MessageKind::kUpdateWeights), ErrorCode::kCuda);
  ask_resume();
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankResume, {}));
  }
  const auto resumed = operator_->next_body<ipc::ResumeReply>(MessageKind::kResumeMemory);
  ASSERT_TRUE(resumed.has_value()) << resumed.error().to_string();
  EXPECT_EQ(resumed->paused, PauseMode::kRetract);
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  EXPECT_EQ(refusal(MessageKind::kContinue), ErrorCode::kNotReady);
}

// Whose hello is older than the pause that took the release's place.
TEST_F(ManagerMemoryTest, ASchedulerThatTakesThePauseForTheReleasesIsToldBetter) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kRetract, ScheduleOrder::kRetract));
  ASSERT_NO_FATAL_FAILURE(say_hello(*client_, PauseMode::kRetract, /*paused_by_release=*/true));
  const Order told = next_order(*client_);
  EXPECT_EQ(told.schedule.order, ScheduleOrder::kRetract);
  EXPECT_FALSE(told.schedule.for_release);
}

TEST_F(ManagerMemoryTest, APauseThatAReleaseMadeSaysSoToSchedulers) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ask_release();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  Order held = next_order(*client_);
  EXPECT_EQ(held.schedule.order, ScheduleOrder::kRetract);
  EXPECT_TRUE(held.schedule.for_release);
  client_->reply(held.request, ipc::SchedulerLoad{});
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(answer(rank, MessageKind::kRankRelease, kBeside));
  }
  held = next_order(*client_);
  EXPECT_TRUE(held.schedule.for_release) << "it goes on as what it is";
  client_->reply(held.request, ipc::SchedulerLoad{});
  ASSERT_TRUE(operator_->next_body<ipc::ReleaseReply>(MessageKind::kReleaseMemory).has_value());
  // A pause of the user's takes its place.
  operator_->ask(MessageKind::kPause, ipc::PauseRequest{"chat", PauseMode::kRetract});
  held = next_order(*client_);
  EXPECT_FALSE(held.schedule.for_release);
}

}  // namespace
}  // namespace kvferry::test
