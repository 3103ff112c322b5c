// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Pause, continue and flush: a real manager between scripted schedulers, workers and operators.
#include "multiproc/manager/manager_generation_fixture.hpp"

#include <csignal>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::CachePhase;
using ipc::GroupId;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::HasSubstr;

TEST_F(ManagerGenerationTest, APauseIsAnsweredWhenItIsInEffect) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  operator_->ask(MessageKind::kPause, ipc::PauseRequest{"chat", PauseMode::kInPlace});
  const Order order = next_order(*client_);
  EXPECT_EQ(order.schedule.order, ScheduleOrder::kInPlace);
  EXPECT_FALSE(operator_->has(MessageKind::kPause));
  client_->reply(order.request, ipc::SchedulerLoad{0, 3, 5, 1});
  const auto reply = operator_->next_body<ipc::PauseReply>(MessageKind::kPause);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_EQ(reply->schedulers, 1U);
  EXPECT_EQ(reply->load.frozen, 3U);
  EXPECT_EQ(reply->load.waiting, 5U);
  EXPECT_EQ(status()["engines"][0]["paused"], "in_place");
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankEmpty)) << "a pause empties nothing";
}

TEST_F(ManagerGenerationTest, ARepeatedPauseIsOrderedAgainAndAnotherModeTakesItsPlace) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kInPlace, ScheduleOrder::kInPlace));
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kInPlace, ScheduleOrder::kInPlace));
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kRetract, ScheduleOrder::kRetract));
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kAbort, ScheduleOrder::kAbort));
  EXPECT_EQ(status()["engines"][0]["paused"], "abort");
}

TEST_F(ManagerGenerationTest, ContinueEmptiesEveryRankBeforeAnythingRuns) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kRetract, ScheduleOrder::kRetract));
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  const auto first = workers_[0]->next(MessageKind::kRankEmpty);
  const auto second = workers_[1]->next(MessageKind::kRankEmpty);
  ASSERT_TRUE(first && second);
  workers_[0]->reply(*first, ipc::AllocatorMemory{100, 60, 50, 7});
  (void)workers_[0]->has(MessageKind::kRankEmpty);  // Its answer has been handled.
  EXPECT_FALSE(client_->has(MessageKind::kSchedule)) << "rank 1 was not emptied yet";
  EXPECT_EQ(status()["engines"][0]["paused"], "retract");
  workers_[1]->reply(*second, ipc::AllocatorMemory{200, 70, 50, 8});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  const auto reply = operator_->next_body<ipc::ContinueReply>(MessageKind::kContinue);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  ASSERT_EQ(reply->ranks.size(), 2U);
  EXPECT_EQ(reply->ranks[1].memory.reserved_before, 200U);
  EXPECT_EQ(reply->ranks[1].memory.reserved_after, 70U);
  EXPECT_EQ(status()["engines"][0]["paused"], nullptr);
}

TEST_F(ManagerGenerationTest, ContinueCanBeToldNotToEmpty) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kAbort, ScheduleOrder::kAbort));
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat", /*empty_cache=*/false});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  const auto reply = operator_->next_body<ipc::ContinueReply>(MessageKind::kContinue);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_TRUE(reply->ranks.empty());
  for (const auto& worker : workers_) EXPECT_FALSE(worker->has(MessageKind::kRankEmpty));
}

TEST_F(ManagerGenerationTest, OnlyAPausedEngineIsContinued) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  EXPECT_EQ(refusal(MessageKind::kContinue), ErrorCode::kNotPaused);
  EXPECT_FALSE(workers_[0]->has(MessageKind::kRankEmpty));
}

TEST_F(ManagerGenerationTest, ARankThatIsNotEmptiedKeepsTheEnginePaused) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kRetract, ScheduleOrder::kRetract));
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  ASSERT_NO_FATAL_FAILURE(empty(EmptyReason::kContinue, /*fail=*/true));
  const auto failed = operator_->next(MessageKind::kContinue);
  ASSERT_TRUE(failed && failed->error);
  EXPECT_EQ(failed->error->code, ErrorCode::kCuda);
  EXPECT_THAT(failed->error->message, HasSubstr("rank 1"));
  const auto detail = ipc::decode<ipc::ContinueReply>(failed->body, "ContinueReply");
  ASSERT_TRUE(detail.has_value());
  EXPECT_EQ(detail->ranks.at(0).memory.reserved_after, 60U);
  EXPECT_FALSE(client_->has(MessageKind::kSchedule));
  EXPECT_EQ(status()["engines"][0]["paused"], "retract");
  // It can be tried again, or done without.
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat", /*empty_cache=*/false});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_TRUE(operator_->next_body<ipc::ContinueReply>(MessageKind::kContinue).has_value());
}

TEST_F(ManagerGenerationTest, FlushForgetsTheHostTierAndEmptiesWhileNothingRuns) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  store(1, 1);
  ASSERT_EQ(presence_of(1), BlockPresence::kHit);
  operator_->ask(MessageKind::kFlush, ipc::FlushRequest{"chat"});
  const Order order = next_order(*client_);
  EXPECT_EQ(order.schedule.order, ScheduleOrder::kIdle);
  EXPECT_FALSE(order.schedule.wait);
  client_->reply(order.request, ipc::SchedulerLoad{});
  const Order forget = next_order(*client_);
  EXPECT_EQ(forget.schedule.order, ScheduleOrder::kFlush);
  EXPECT_EQ(presence_of(1), BlockPresence::kHit) << "nothing is dropped before it is held";
  client_->reply(forget.request, ipc::SchedulerLoad{});
  const auto first = workers_[0]->next(MessageKind::kRankEmpty);
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(presence_of(1), BlockPresence::kMiss);
  EXPECT_FALSE(client_->has(MessageKind::kSchedule)) << "held until all is done";
  workers_[0]->reply(*first, ipc::AllocatorMemory{});
  (void)workers_[0]->has(MessageKind::kRankEmpty);  // Its answer has been handled.
  EXPECT_FALSE(client_->has(MessageKind::kSchedule));
  const auto second = workers_[1]->next(MessageKind::kRankEmpty);
  ASSERT_TRUE(second.has_value());
  workers_[1]->reply(*second, ipc::AllocatorMemory{});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  const auto reply = operator_->next_body<ipc::FlushReply>(MessageKind::kFlush);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_EQ(reply->host_blocks_dropped, 1U);
  EXPECT_EQ(reply->ranks.size(), 2U);
  EXPECT_EQ(status()["engines"][0]["flushes"], 1);
}

TEST_F(ManagerGenerationTest, FlushCanKeepTheHostTierAndTheCaches) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  store(1, 1);
  ipc::FlushRequest flush{"chat", /*empty_cache=*/false, ipc::HostPolicy::kKeep};
  operator_->ask(MessageKind::kFlush, flush);
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  const auto reply = operator_->next_body<ipc::FlushReply>(MessageKind::kFlush);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_EQ(presence_of(1), BlockPresence::kHit);
  for (const auto& worker : workers_) EXPECT_FALSE(worker->has(MessageKind::kRankEmpty));
}

TEST_F(ManagerGenerationTest, FlushOfABusyEngineChangesNothingAndSaysWhat) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  store(1, 1);
  operator_->ask(MessageKind::kFlush, ipc::FlushRequest{"chat"});
  const Order order = next_order(*client_);
  client_->reply_error(order.request, KVFERRY_ERROR(kNotIdle, "4 requests run"));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kFlush), ErrorCode::kNotIdle);
  EXPECT_THAT(refusal_, HasSubstr("4 requests run"));
  EXPECT_EQ(presence_of(1), BlockPresence::kHit);
  EXPECT_EQ(status()["engines"][0]["flushes"], 0);
  for (const auto& worker : workers_) EXPECT_FALSE(worker->has(MessageKind::kRankEmpty));
}

TEST_F(ManagerGenerationTest, FlushLeavesAPausedEnginePaused) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kRetract, ScheduleOrder::kRetract));
  operator_->ask(MessageKind::kFlush, ipc::FlushRequest{"chat"});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(empty(EmptyReason::kFlush));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRetract));
  EXPECT_TRUE(operator_->next_body<ipc::FlushReply>(MessageKind::kFlush).has_value());
  EXPECT_EQ(status()["engines"][0]["paused"], "retract");
}

TEST_F(ManagerGenerationTest, AFlushThatMayWaitTellsTheSchedulerWhenItsTimeIsOver) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  operator_->ask(MessageKind::kFlush,
                 ipc::FlushRequest{"chat", true, ipc::HostPolicy::kDrop, 50ms});
  const Order order = next_order(*client_);
  EXPECT_TRUE(order.schedule.wait);
  const Order now = next_order(*client_);
  EXPECT_EQ(now.schedule.order, ScheduleOrder::kIdle);
  EXPECT_FALSE(now.schedule.wait);
  client_->reply_error(order.request, KVFERRY_ERROR(kNotIdle, "still 1 request runs"));
  client_->reply_error(now.request, KVFERRY_ERROR(kNotIdle, "still 1 request runs"));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kFlush), ErrorCode::kNotIdle);
  EXPECT_THAT(refusal_, HasSubstr("still 1"));
}

// The answer to the first order was on its way: what comes is not to let it run in the middle.
TEST_F(ManagerGenerationTest, AFlushThatIsIdleInTheLastMomentIsCarriedOut) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  operator_->ask(MessageKind::kFlush,
                 ipc::FlushRequest{"chat", true, ipc::HostPolicy::kDrop, 50ms});
  const Order order = next_order(*client_);
  const Order now = next_order(*client_);
  client_->reply(order.request, ipc::SchedulerLoad{});
  client_->reply(now.request, ipc::SchedulerLoad{});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(empty(EmptyReason::kFlush));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_TRUE(operator_->next_body<ipc::FlushReply>(MessageKind::kFlush).has_value());
}

TEST_F(ManagerGenerationTest, NobodyForgetsAnythingBeforeAllAreIdle) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  auto busy = peer(ProcessKind::kEngine, "busy");
  ASSERT_NO_FATAL_FAILURE(say_hello(*busy));
  operator_->ask(MessageKind::kFlush, ipc::FlushRequest{"chat"});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  busy->reply_error(next_order(*busy).request, KVFERRY_ERROR(kNotIdle, "2 requests run"));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kFlush), ErrorCode::kNotIdle);
  EXPECT_THAT(refusal_, testing::AllOf(HasSubstr("scheduler busy (pid"), HasSubstr("2 requests")));
}

TEST_F(ManagerGenerationTest, WhoAsksForAFlushAndGoesTakesTheWaitingWithIt) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  auto asker = peer(ProcessKind::kOperator, "asker");
  asker->ask(MessageKind::kFlush, ipc::FlushRequest{"chat", true, ipc::HostPolicy::kDrop, 600s});
  const Order order = next_order(*client_);
  asker.reset();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kRetract, ScheduleOrder::kRetract));
}

TEST_F(ManagerGenerationTest, AClientThatComesInTheMiddleOfAFlushIsGreetedAfterIt) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  operator_->ask(MessageKind::kFlush, ipc::FlushRequest{"chat", /*empty_cache=*/false});
  const Order order = next_order(*client_);
  auto late = peer(ProcessKind::kEngine, "late");
  ipc::EngineHello hello = client_hello();
  hello.schedules = true;
  late->ask(MessageKind::kEngineHello, hello);
  EXPECT_FALSE(late->has(MessageKind::kEngineHello));
  client_->reply(order.request, ipc::SchedulerLoad{});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_TRUE(operator_->next_body<ipc::FlushReply>(MessageKind::kFlush).has_value());
  EXPECT_TRUE(late->next(MessageKind::kEngineHello).has_value());
}

TEST_F(ManagerGenerationTest, AWorkerThatDiesWhileItIsEmptiedHasNoCacheLeft) {
  ASSERT_NO_FATAL_FAILURE(start_manager());
  ChildProcess worker = peer_child("worker", 0, 1);
  ASSERT_EQ(worker.read_line(soon()), "ready");
  client_ = peer(ProcessKind::kEngine, "engine chat");
  ipc::EngineHello hello = client_hello(1);
  hello.schedules = true;
  hello.paused = PauseMode::kRetract;
  ASSERT_TRUE(client_->call<ipc::EngineState>(MessageKind::kEngineHello, hello).has_value());
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  EXPECT_FALSE(operator_->has(MessageKind::kContinue));  // It has begun.
  worker.kill();
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  const auto reply = operator_->next_body<ipc::ContinueReply>(MessageKind::kContinue);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_TRUE(reply->ranks.at(0).absent);
  EXPECT_EQ(status()["engines"][0]["paused"], nullptr);
}

// Nobody but that worker keeps the engine, and the operation that its death ends.
TEST_F(ManagerGenerationTest, TheLastProcessOfAnEngineDiesInTheMiddle) {
  ASSERT_NO_FATAL_FAILURE(start_manager());
  ChildProcess worker = peer_child("worker", 0, 1);
  ASSERT_EQ(worker.read_line(soon()), "ready");
  operator_->ask(MessageKind::kPause, ipc::PauseRequest{"chat", PauseMode::kRetract});
  ASSERT_TRUE(operator_->next_body<ipc::PauseReply>(MessageKind::kPause).has_value());
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  EXPECT_FALSE(operator_->has(MessageKind::kContinue));
  worker.kill();
  EXPECT_TRUE(operator_->next_body<ipc::ContinueReply>(MessageKind::kContinue).has_value());
  EXPECT_TRUE(status()["engines"].empty());
}

TEST_F(ManagerGenerationTest, AWorkerThatIsAwayAndLivesIsNotCalledEmptied) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kRetract, ScheduleOrder::kRetract));
  workers_[1].reset();  // Its process, this one, lives on.
  ASSERT_TRUE(wait_state(CachePhase::kDetached, false));
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  const auto request = workers_[0]->next(MessageKind::kRankEmpty);
  ASSERT_TRUE(request.has_value());
  workers_[0]->reply(*request, ipc::AllocatorMemory{});
  EXPECT_EQ(refusal(MessageKind::kContinue), ErrorCode::kNotReady);
  EXPECT_THAT(refusal_, HasSubstr("rank 1: its worker (pid"));
  EXPECT_EQ(status()["engines"][0]["paused"], "retract");
}

TEST_F(ManagerGenerationTest, AContinueThatDoesNotReachASchedulerCanBeRepeated) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kRetract, ScheduleOrder::kRetract));
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat", false, 50ms});
  const Order unheard = next_order(*client_);
  EXPECT_EQ(refusal(MessageKind::kContinue), ErrorCode::kTimeout);
  EXPECT_THAT(refusal_, HasSubstr("engine chat"));
  EXPECT_EQ(status()["engines"][0]["paused"], "retract");
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat", false});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_TRUE(operator_->next_body<ipc::ContinueReply>(MessageKind::kContinue).has_value());
}

TEST_F(ManagerGenerationTest, AFlushNeedsASchedulerThatForgets) {
  ASSERT_NO_FATAL_FAILURE(start_manager());
  add_worker(0);
  operator_->ask(MessageKind::kFlush, ipc::FlushRequest{"chat"});
  EXPECT_EQ(refusal(MessageKind::kFlush), ErrorCode::kNotReady);
  EXPECT_THAT(refusal_, HasSubstr("no scheduler is connected"));
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  EXPECT_EQ(refusal(MessageKind::kContinue), ErrorCode::kNotReady) << "it may be paused";
}

TEST_F(ManagerGenerationTest, TheManagersEndAnswersWhatRuns) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  operator_->ask(MessageKind::kFlush, ipc::FlushRequest{"chat"});
  (void)next_order(*client_);
  manager_->signal(SIGTERM);
  EXPECT_EQ(refusal(MessageKind::kFlush), ErrorCode::kCancelled);
}

// Its client calls itself idle, and a copy runs all the same: of an earlier client, say.
TEST_F(ManagerGenerationTest, TransfersThatOnlyTheManagerKnowsCountToo) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  const auto slots = reserve({{GroupId{0}, key(1)}});
  submit_store(1, {{GroupId{0}, BlockId{3}, slots.at(0)}});
  operator_->ask(MessageKind::kFlush, ipc::FlushRequest{"chat"});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_EQ(refusal(MessageKind::kFlush), ErrorCode::kNotIdle);
  EXPECT_THAT(refusal_, HasSubstr("1 transfers"));

  operator_->ask(MessageKind::kFlush, ipc::FlushRequest{"chat", true, ipc::HostPolicy::kDrop, 20s});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kIdle));
  EXPECT_FALSE(client_->has(MessageKind::kSchedule)) << "the copy still runs";
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kFlush));
  ASSERT_NO_FATAL_FAILURE(empty(EmptyReason::kFlush));
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_TRUE(operator_->next_body<ipc::FlushReply>(MessageKind::kFlush).has_value());
}

TEST_F(ManagerGenerationTest, EverySchedulerIsAskedAndOneThatLeavesIsNotWaitedFor) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  auto other = peer(ProcessKind::kEngine, "other");
  ASSERT_NO_FATAL_FAILURE(say_hello(*other));
  operator_->ask(MessageKind::kPause, ipc::PauseRequest{"chat", PauseMode::kRetract});
  (void)next_order(*other);
  const Order order = next_order(*client_);
  client_->reply(order.request, ipc::SchedulerLoad{0, 0, 2, 0});
  EXPECT_FALSE(operator_->has(MessageKind::kPause)) << "the other one has not done it";
  other->notify(MessageKind::kBye, ipc::Empty{});
  other.reset();
  const auto reply = operator_->next_body<ipc::PauseReply>(MessageKind::kPause);
  ASSERT_TRUE(reply.has_value()) << reply.error().to_string();
  EXPECT_EQ(reply->schedulers, 1U);
  EXPECT_EQ(reply->load.waiting, 2U);
}

TEST_F(ManagerGenerationTest, ASchedulerThatComesLaterIsHeldToo) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  ASSERT_NO_FATAL_FAILURE(pause(PauseMode::kInPlace, ScheduleOrder::kInPlace));
  auto other = peer(ProcessKind::kEngine, "other");
  ASSERT_NO_FATAL_FAILURE(say_hello(*other));
  EXPECT_EQ(next_order(*other).schedule.order, ScheduleOrder::kInPlace);
  auto unaware = peer(ProcessKind::kEngine, "unaware");
  ASSERT_NO_FATAL_FAILURE(say_hello(*unaware, PauseMode::kAbort));
  EXPECT_EQ(next_order(*unaware).schedule.order, ScheduleOrder::kInPlace);
  auto knowing = peer(ProcessKind::kEngine, "knowing");
  ASSERT_NO_FATAL_FAILURE(say_hello(*knowing, PauseMode::kInPlace));
  EXPECT_FALSE(knowing->has(MessageKind::kSchedule)) << "it obeys already";
}

TEST_F(ManagerGenerationTest, APauseOutlivesTheManager) {
  ASSERT_NO_FATAL_FAILURE(start_manager());
  auto running = peer(ProcessKind::kEngine, "running");
  ASSERT_NO_FATAL_FAILURE(say_hello(*running));
  client_ = peer(ProcessKind::kEngine, "engine chat");
  ASSERT_NO_FATAL_FAILURE(say_hello(*client_, PauseMode::kRetract));
  EXPECT_EQ(status()["engines"][0]["paused"], "retract");
  EXPECT_EQ(next_order(*running).schedule.order, ScheduleOrder::kRetract) << "it came first";
  running->notify(MessageKind::kBye, ipc::Empty{});
  running.reset();
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat"});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_TRUE(operator_->next_body<ipc::ContinueReply>(MessageKind::kContinue).has_value());
  // It was away while it was continued: what this manager was told since counts.
  ASSERT_NO_FATAL_FAILURE(say_hello(*client_, PauseMode::kRetract));
  EXPECT_EQ(next_order(*client_).schedule.order, ScheduleOrder::kRun);
  EXPECT_EQ(status()["engines"][0]["paused"], nullptr);
}

TEST_F(ManagerGenerationTest, AnEngineWithoutASchedulerIsNotCalledPaused) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  operator_->ask(MessageKind::kPause, ipc::PauseRequest{"chat", PauseMode::kRetract});
  EXPECT_EQ(refusal(MessageKind::kPause), ErrorCode::kInvalidArgument);
  EXPECT_THAT(refusal_, HasSubstr("ClientOptions::scheduler"));
  operator_->ask(MessageKind::kFlush, ipc::FlushRequest{"chat"});
  EXPECT_EQ(refusal(MessageKind::kFlush), ErrorCode::kInvalidArgument);
  EXPECT_EQ(status()["engines"][0]["paused"], nullptr);
}

TEST_F(ManagerGenerationTest, APauseThatTakesTooLongStaysOrdered) {
  ASSERT_NO_FATAL_FAILURE(start_scheduling());
  operator_->ask(MessageKind::kPause, ipc::PauseRequest{"chat", PauseMode::kRetract, 50ms});
  const Order order = next_order(*client_);
  EXPECT_EQ(refusal(MessageKind::kPause), ErrorCode::kTimeout);
  EXPECT_EQ(status()["engines"][0]["paused"], "retract");
  client_->reply(order.request, ipc::SchedulerLoad{});
  operator_->ask(MessageKind::kContinue, ipc::ContinueRequest{"chat", /*empty_cache=*/false});
  ASSERT_NO_FATAL_FAILURE(obey(ScheduleOrder::kRun));
  EXPECT_TRUE(operator_->next_body<ipc::ContinueReply>(MessageKind::kContinue).has_value());
}

}  // namespace
}  // namespace kvferry::test
