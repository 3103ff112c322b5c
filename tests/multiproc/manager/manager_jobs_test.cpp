// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "multiproc/manager/manager_fixture.hpp"

#include <gmock/gmock.h>

namespace kvferry::test {
namespace {

using ipc::BlockId;
using ipc::BlockPresence;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::JobId;
using ipc::MessageKind;
using ipc::ProcessKind;
using testing::ElementsAre;
using testing::HasSubstr;

using ManagerJobsTest = ManagerTest;

TEST_F(ManagerJobsTest, BlockIsVisibleOnlyAfterAllRanksHaveStoredIt) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  const auto slots = reserve({{GroupId{0}, key(1)}});
  submit_store(1, {{GroupId{0}, BlockId{3}, slots.at(0)}});
  std::vector<ipc::MoverJob> jobs;
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    EXPECT_EQ(job->direction, ipc::CopyDirection::kDeviceToHost);
    jobs.push_back(*job);
  }
  EXPECT_EQ(jobs[0].session, ScriptedPeer::session_of(0));
  EXPECT_EQ(jobs[1].session, ScriptedPeer::session_of(1));
  EXPECT_NE(jobs[0].items.at(0).shard_offset, jobs[1].items.at(0).shard_offset);
  movers_[0]->finish(jobs[0]);
  EXPECT_FALSE(movers_[0]->has(MessageKind::kMoverCancel)) << "waits until the answer was handled";
  EXPECT_EQ(lookup({1}).presence.at(0), static_cast<std::uint8_t>(BlockPresence::kHitPending));
  EXPECT_FALSE(client_->has(MessageKind::kJobDone));
  movers_[1]->finish(jobs[1]);
  const ipc::JobDone done = wait_done();
  EXPECT_EQ(done.job, JobId{1});
  EXPECT_THAT(done.results, ElementsAre(0));
  EXPECT_EQ(done.bytes, 8192U);
  EXPECT_EQ(lookup({1}).presence.at(0), static_cast<std::uint8_t>(BlockPresence::kHit));
}

TEST_F(ManagerJobsTest, PrefixNeedsEveryGroup) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  store(2, 2);
  EXPECT_EQ(lookup({1, 2}).usable_prefix, 0U) << "the state group has nothing";
  store(2, 2, 1);
  EXPECT_EQ(lookup({1, 2}).usable_prefix, 2U);
  EXPECT_EQ(lookup({1}).usable_prefix, 0U);
}

TEST_F(ManagerJobsTest, StoreThatFailsOnOneRankLeavesNothing) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  const auto slots = reserve({{GroupId{0}, key(1)}});
  submit_store(1, {{GroupId{0}, BlockId{3}, slots.at(0)}});
  ErrorCode broken = ErrorCode::kCuda;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const auto job = movers_[rank]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    movers_[rank]->finish(*job, rank == 1 ? &broken : nullptr);
  }
  const ipc::JobDone done = wait_done();
  EXPECT_THAT(done.results, ElementsAre(code(ErrorCode::kCuda)));
  EXPECT_THAT(done.message, HasSubstr("scripted mover"));
  EXPECT_EQ(lookup({1}).presence.at(0), static_cast<std::uint8_t>(BlockPresence::kMiss));
  EXPECT_EQ(status()["pool"]["used"], 0);
}

TEST_F(ManagerJobsTest, LoadOfAMissingBlockIsNotFoundAndTheOthersAreLoaded) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}, {GroupId{0}, BlockId{6}, key(404)}});
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  EXPECT_THAT(wait_done().results, ElementsAre(0, code(ErrorCode::kNotFound)));
}

TEST_F(ManagerJobsTest, BadJobsAreRefusedWholeAndEndTheirReservations) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}, {GroupId{0}, BlockId{5}, key(1)}});
  EXPECT_THAT(wait_done().results,
              ElementsAre(code(ErrorCode::kInvalidArgument), code(ErrorCode::kInvalidArgument)));
  submit_load(3, {{GroupId{0}, BlockId{kTinyBlocks}, key(1)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kInvalidArgument)));
  submit_load(4, {{GroupId{9}, BlockId{0}, key(1)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kInvalidArgument)));
  const auto slots = reserve({{GroupId{0}, key(2)}});
  submit_store(5, {{GroupId{1}, BlockId{3}, slots.at(0)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kInvalidArgument)));
  EXPECT_EQ(status()["index"]["reserved"], 0);
  submit_store(6, {{GroupId{0}, BlockId{3}, slots.at(0)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kInvalidArgument)));
  EXPECT_FALSE(movers_[0]->has(MessageKind::kMoverJob));
}

TEST_F(ManagerJobsTest, JobOfAnotherGenerationIsStale) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  --state_.generation;
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kStaleEpoch)));
  EXPECT_EQ(status()["engines"][0]["jobs"]["stale"], 1);
}

TEST_F(ManagerJobsTest, AnIdIsTakenOnceAlsoWhenItWasRefusedOrStillRuns) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  const auto again = [this](std::uint64_t job, std::uint64_t generation) {
    const auto answer = client_->call<ipc::Empty>(
        MessageKind::kSubmitLoad,
        ipc::SubmitLoad{
            JobId{job}, generation, {1}, std::nullopt, {{GroupId{0}, BlockId{5}, key(1)}}});
    return answer ? std::nullopt : std::optional(answer.error().code);
  };
  --state_.generation;
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kStaleEpoch)));
  ++state_.generation;
  EXPECT_EQ(again(2, state_.generation), ErrorCode::kAlreadyExists) << "refused before";
  submit_load(3, {{GroupId{0}, BlockId{5}, key(1)}});
  // What else is wrong with it does not matter: an answer would be taken for the first one's.
  EXPECT_EQ(again(3, state_.generation - 1), ErrorCode::kAlreadyExists) << "still runs";
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  const ipc::JobDone done = wait_done();
  EXPECT_EQ(done.job, JobId{3});
  EXPECT_THAT(done.results, ElementsAre(0));
}

TEST_F(ManagerJobsTest, AFullTableHidesNoOtherReason) {
  max_jobs_ = 1;
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}});
  submit_load(3, {{GroupId{0}, BlockId{6}, key(1)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kBusy)));
  --state_.generation;
  submit_load(4, {{GroupId{0}, BlockId{6}, key(1)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kStaleEpoch)));
  EXPECT_EQ(status()["engines"][0]["jobs"]["stale"], 1);
}

TEST_F(ManagerJobsTest, AFullTableHidesNothingThatIsWrongWithAStoreOrASwap) {
  max_jobs_ = 1;
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}});
  submit_store(3, {{GroupId{0}, BlockId{3}, 404}});
  const ipc::JobDone unreserved = wait_done();
  EXPECT_THAT(unreserved.results, ElementsAre(code(ErrorCode::kInvalidArgument)));
  EXPECT_THAT(unreserved.message, testing::Not(HasSubstr("of a refused store"))) << "none ended";
  const auto swap = [this](std::uint64_t job, std::uint32_t second) {
    const auto answer = client_->call<ipc::Empty>(
        MessageKind::kSwapOut,
        ipc::SwapSequence{JobId{job},
                          state_.generation,
                          7,
                          {{GroupId{0}, BlockId{1}, 0}, {GroupId{0}, BlockId{2}, second}}});
    EXPECT_TRUE(answer.has_value());
    return wait_done().results;
  };
  EXPECT_THAT(swap(4, 0), testing::Each(code(ErrorCode::kInvalidArgument))) << "an index twice";
  EXPECT_THAT(swap(5, 1), testing::Each(code(ErrorCode::kBusy)));
  const auto slots = reserve({{GroupId{0}, key(2)}});
  submit_store(6, {{GroupId{0}, BlockId{3}, slots.at(0)}});
  const ipc::JobDone full = wait_done();
  EXPECT_THAT(full.results, ElementsAre(code(ErrorCode::kBusy)));
  EXPECT_THAT(full.message, HasSubstr("reserve its blocks again"));
  EXPECT_EQ(status()["index"]["reserved"], 0);
}

TEST_F(ManagerJobsTest, CancelledJobIsAnsweredOnce) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}});
  submit_load(3, {{GroupId{0}, BlockId{5}, key(1)}});  // Waits for the first.
  client_->notify(MessageKind::kCancel, ipc::CancelJob{JobId{3}});
  EXPECT_EQ(wait_done().job, JobId{3});
  client_->notify(MessageKind::kCancel, ipc::CancelJob{JobId{2}});
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    const auto cancel = mover->next_body<ipc::MoverCancel>(MessageKind::kMoverCancel);
    ASSERT_TRUE(cancel.has_value());
    EXPECT_EQ(cancel->job, job->job);
    ErrorCode cancelled = ErrorCode::kCancelled;
    mover->finish(*job, &cancelled);
  }
  EXPECT_EQ(wait_done().job, JobId{2});
  EXPECT_FALSE(client_->has(MessageKind::kJobDone));
}

TEST_F(ManagerJobsTest, PinnedBlocksOutliveAFullPool) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  const auto pinned =
      client_->call<ipc::PinReply>(MessageKind::kPin, ipc::PinRequest{{key(1), key(404)}});
  ASSERT_TRUE(pinned.has_value());
  EXPECT_EQ(pinned->pinned, 1U);
  // 4 MiB hold fewer than 300 blocks of two ranks with 8 KiB each.
  std::vector<ipc::StoreKey> keys;
  for (std::uint64_t i = 0; i < 300; ++i) {
    keys.push_back({GroupId{0}, key(1000 + i)});
  }
  const auto reply = client_->call<ipc::ReserveStoreReply>(MessageKind::kReserveStore,
                                                           ipc::ReserveStore{keys, state_.weights});
  ASSERT_TRUE(reply.has_value());
  EXPECT_EQ(reply->slots.back().outcome, ipc::ReserveOutcome::kFull);
  EXPECT_EQ(lookup({1}).presence.at(0), static_cast<std::uint8_t>(BlockPresence::kHit));
}

TEST_F(ManagerJobsTest, SwappedOutSequenceSurvivesAClearAndComesBack) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  client_->notify(MessageKind::kSwapOut,
                  ipc::SwapSequence{JobId{2},
                                    state_.generation,
                                    42,
                                    {{GroupId{0}, BlockId{2}, 0}, {GroupId{0}, BlockId{3}, 1}}});
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  EXPECT_THAT(wait_done().results, ElementsAre(0, 0));

  operator_->ask(MessageKind::kClear, ipc::ClearRequest{"chat"});
  ASSERT_NO_FATAL_FAILURE(answer_clears(1));
  const auto cleared = operator_->next_body<ipc::ClearReply>(MessageKind::kClear);
  ASSERT_TRUE(cleared.has_value());
  EXPECT_EQ(cleared->host_blocks_dropped, 1U);
  for (const std::uint32_t rank : {0U, 1U}) {
    workers_[rank]->report_mapped(rank, 2);
    movers_[rank]->report_mapped(rank, 2);
  }
  ASSERT_TRUE(wait_state(ipc::CachePhase::kCleared, false));
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));

  client_->notify(MessageKind::kSwapIn,
                  ipc::SwapSequence{JobId{3},
                                    state_.generation,
                                    42,
                                    {{GroupId{0}, BlockId{7}, 0}, {GroupId{0}, BlockId{8}, 5}}});
  ASSERT_NO_FATAL_FAILURE(movers_finish());
  EXPECT_THAT(wait_done().results, ElementsAre(0, code(ErrorCode::kNotFound)));
  EXPECT_TRUE(client_->call<ipc::Empty>(MessageKind::kDropSequence, ipc::DropSequence{42}));
  EXPECT_EQ(
      client_->call<ipc::Empty>(MessageKind::kDropSequence, ipc::DropSequence{42}).error().code,
      ErrorCode::kNotFound);
  EXPECT_EQ(status()["pool"]["used"], 0);
}

TEST_F(ManagerJobsTest, DeadMoversJobIsAnsweredOnlyAfterItsWorkerHasQuiesced) {
  start_manager();
  ASSERT_NO_FATAL_FAILURE(connect_client());
  ASSERT_NO_FATAL_FAILURE(add_worker(0));
  ASSERT_NO_FATAL_FAILURE(add_worker(1));
  ASSERT_NO_FATAL_FAILURE(add_mover(0));
  ChildProcess mover = peer_child("mover", 1);
  ASSERT_TRUE(mover.wait_line("ready", soon())) << mover.stderr_text();
  ASSERT_NO_FATAL_FAILURE(settle(1));
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));

  const auto slots = reserve({{GroupId{0}, key(1)}});
  submit_store(1, {{GroupId{0}, BlockId{3}, slots.at(0)}});
  ASSERT_TRUE(mover.wait_line("job 1", soon()));
  const auto job = movers_[0]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(job.has_value());
  movers_[0]->finish(*job);

  mover.kill();
  const auto quiesce = workers_[1]->next(MessageKind::kQuiesceStaging);
  ASSERT_TRUE(quiesce.has_value());
  EXPECT_FALSE(client_->has(MessageKind::kJobDone)) << "the staging agent may still copy";
  EXPECT_TRUE(wait_state(ipc::CachePhase::kReady, false));
  workers_[1]->reply_error(*quiesce, KVFERRY_ERROR(kTimeout, "a gather is still running"));
  const auto again = workers_[1]->next(MessageKind::kQuiesceStaging);
  ASSERT_TRUE(again.has_value());
  EXPECT_FALSE(client_->has(MessageKind::kJobDone));
  workers_[1]->reply(*again, ipc::Empty{});
  const ipc::JobDone done = wait_done();
  EXPECT_THAT(done.results, ElementsAre(code(ErrorCode::kPeerDied)));
  EXPECT_EQ(status()["pool"]["used"], 0);

  // Another mover takes its place, and offload goes on.
  ASSERT_NO_FATAL_FAILURE(add_mover(1));
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  store(2, 4);
}

TEST_F(ManagerJobsTest, OffloadWaitsUntilTheWorkerWorksForNoOtherMover) {
  start_manager();
  ASSERT_NO_FATAL_FAILURE(connect_client());
  for (const std::uint32_t rank : {0U, 1U}) {
    ASSERT_NO_FATAL_FAILURE(add_worker(rank));
  }
  ASSERT_NO_FATAL_FAILURE(add_mover(0));
  movers_[1] = peer(ipc::ProcessKind::kMover, "mover chat/1");
  ASSERT_TRUE(movers_[1]->rank_hello(1, tiny_geometry()).has_value());
  movers_[1]->report_mapped(1, 1);
  // A mover that this manager never knew may have died with a scatter under way.
  const auto request = workers_[1]->next(MessageKind::kQuiesceStaging);
  ASSERT_TRUE(request.has_value());
  const auto quiesce = ipc::decode<ipc::QuiesceStaging>(request->body, "QuiesceStaging");
  ASSERT_TRUE(quiesce.has_value());
  EXPECT_TRUE(quiesce->others);
  EXPECT_EQ(quiesce->mover, movers_[1]->id());
  EXPECT_EQ(status()["proofs_open"], 1);
  workers_[1]->reply_error(*request, KVFERRY_ERROR(kTimeout, "a scatter is still running"));
  const auto again = workers_[1]->next(MessageKind::kQuiesceStaging);
  ASSERT_TRUE(again.has_value());
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, false));
  submit_load(1, {{GroupId{0}, BlockId{3}, key(1)}});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kNotReady)));
  EXPECT_FALSE(movers_[0]->has(MessageKind::kMoverJob));
  workers_[1]->reply(*again, ipc::Empty{});
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  EXPECT_EQ(status()["proofs_open"], 0);
  store(2, 4);
}

TEST_F(ManagerJobsTest, DeadMoverAndDeadWorkerNeedNoQuiesce) {
  start_manager();
  ASSERT_NO_FATAL_FAILURE(connect_client());
  ASSERT_NO_FATAL_FAILURE(add_worker(0));
  ASSERT_NO_FATAL_FAILURE(add_mover(0));
  ChildProcess worker = peer_child("worker", 1);
  ASSERT_TRUE(worker.wait_line("ready", soon()));
  ChildProcess mover = peer_child("mover", 1);
  ASSERT_TRUE(mover.wait_line("ready", soon()));
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  const auto slots = reserve({{GroupId{0}, key(1)}});
  submit_store(1, {{GroupId{0}, BlockId{3}, slots.at(0)}});
  ASSERT_TRUE(mover.wait_line("job 1", soon()));
  const auto job = movers_[0]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(job.has_value());
  movers_[0]->finish(*job);
  mover.kill();
  worker.kill();
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kPeerDied)));
  EXPECT_TRUE(wait_state(ipc::CachePhase::kDetached, false));
}

TEST_F(ManagerJobsTest, MoverThatKeepsAJobTooLongIsKilledAndItsJobEnds) {
  start_manager(std::chrono::milliseconds(1500));  // The other mover, this process, is in time.
  ASSERT_NO_FATAL_FAILURE(connect_client());
  ASSERT_NO_FATAL_FAILURE(add_worker(0));
  ASSERT_NO_FATAL_FAILURE(add_worker(1));
  ASSERT_NO_FATAL_FAILURE(add_mover(0));
  ChildProcess mover = peer_child("mover", 1);
  ASSERT_TRUE(mover.wait_line("ready", soon()));
  ASSERT_NO_FATAL_FAILURE(settle(1));
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  const auto slots = reserve({{GroupId{0}, key(1)}});
  submit_store(1, {{GroupId{0}, BlockId{3}, slots.at(0)}});
  const auto job = movers_[0]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(job.has_value());
  movers_[0]->finish(*job);
  EXPECT_EQ(mover.wait(soon()), ChildExit::killed_by(SIGKILL));
  const auto quiesce = workers_[1]->next(MessageKind::kQuiesceStaging);
  ASSERT_TRUE(quiesce.has_value());
  workers_[1]->reply(*quiesce, ipc::Empty{});
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kPeerDied)));
}

TEST_F(ManagerJobsTest, MoverWhoseWorkerIsStoppedIsLeftAliveAndItsJobCancelled) {
  start_manager(std::chrono::milliseconds(1000));
  ASSERT_NO_FATAL_FAILURE(connect_client());
  ASSERT_NO_FATAL_FAILURE(add_worker(0));
  ASSERT_NO_FATAL_FAILURE(add_mover(0));
  ChildProcess worker = peer_child("worker", 1);
  ASSERT_TRUE(worker.wait_line("ready", soon())) << worker.stderr_text();
  ASSERT_NO_FATAL_FAILURE(add_mover(1));
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  EXPECT_TRUE(worker.stop());
  const auto slots = reserve({{GroupId{0}, key(1)}});
  submit_store(1, {{GroupId{0}, BlockId{3}, slots.at(0)}});
  const auto first = movers_[0]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(first.has_value());
  movers_[0]->finish(*first);
  const auto job = movers_[1]->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
  ASSERT_TRUE(job.has_value());
  ASSERT_TRUE(movers_[1]->next(MessageKind::kMoverCancel).has_value());
  const ipc::Deadline deadline = soon();
  while (manager_->stderr_text().find("is stopped") == std::string::npos && !deadline.expired()) {
    (void)status();  // Each round is an answer of the manager.
  }
  // Had the manager ended the mover, it would have been this very process.
  EXPECT_NE(manager_->stderr_text().find("left alone"), std::string::npos);
  ErrorCode cancelled = ErrorCode::kCancelled;
  movers_[1]->finish(*job, &cancelled);
  EXPECT_THAT(wait_done().results, ElementsAre(code(ErrorCode::kTimeout)));
  worker.signal(SIGCONT);
}

TEST_F(ManagerJobsTest, MoverThatGetsOnIsNotKilledForAJobThatWaitsBehindOthers) {
  start_manager(std::chrono::milliseconds(2500));
  ASSERT_NO_FATAL_FAILURE(connect_client());
  ASSERT_NO_FATAL_FAILURE(add_worker(0));
  ASSERT_NO_FATAL_FAILURE(add_worker(1));
  ASSERT_NO_FATAL_FAILURE(add_mover(0));
  ASSERT_NO_FATAL_FAILURE(add_mover(1));
  ASSERT_TRUE(wait_state(ipc::CachePhase::kReady, true));
  const auto keep = reserve({{GroupId{0}, key(1)}});
  submit_store(1, {{GroupId{0}, BlockId{1}, keep.at(0)}});
  std::vector<ipc::MoverJob> kept;
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    kept.push_back(*job);
  }
  // The movers are this very process: were they killed, the test would die.
  const ipc::TimePoint end = ipc::MonotonicClock::now() + std::chrono::milliseconds(5500);
  for (std::uint64_t i = 0; ipc::MonotonicClock::now() < end; ++i) {
    store(1000 + i, 2);
  }
  movers_[0]->finish(kept[0]);
  movers_[1]->finish(kept[1]);
  const ipc::JobDone done = wait_done();
  EXPECT_EQ(done.job.value, 1U);
  EXPECT_THAT(done.results, ElementsAre(0)) << done.message;
}

// A client that submits and never reads.
TEST_F(ManagerJobsTest, UnreadCompletionsAreBoundedAndComeWhenTheyAreRead) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  std::uint64_t next = 1;
  const auto submit = [&](std::uint64_t jobs, std::uint64_t generation) {
    for (const std::uint64_t end = next + jobs; next < end; ++next) {
      ipc::Envelope envelope;
      envelope.kind = MessageKind::kSubmitLoad;
      envelope.body = ipc::encode(ipc::SubmitLoad{
          JobId{next}, generation, {1}, std::nullopt, {{GroupId{0}, BlockId{1}, key(404)}}});
      while (!client_->link().send(envelope)) {
        (void)status();  // The manager reads on.
      }
    }
  };
  submit(30'000, state_.generation - 1);  // Refused, each with a completion: more than queues take.
  (void)status();
  submit(3000, state_.generation);  // Over at once, for there is no such block.
  // Tens of thousands of messages, which a sanitizer looks at.
  const ipc::Deadline deadline = ipc::Deadline::after(std::chrono::seconds(100));
  while (status()["engines"][0]["jobs"]["failed"] < 33'000 && !deadline.expired()) {
    // Each round is an answer of the manager.
  }
  EXPECT_GT(status()["unread_completions"], 0);
  EXPECT_LE(status()["unread_completions"], 1024);
  while (status()["unread_completions"] != 0 && !deadline.expired()) {
    while (client_->next(MessageKind::kJobDone, ipc::Deadline::at(ipc::TimePoint{}))) {
    }
  }
  EXPECT_EQ(status()["unread_completions"], 0);
  EXPECT_TRUE(client_->call<ipc::LookupReply>(MessageKind::kLookup, ipc::Lookup{{key(1)}}));
}

TEST_F(ManagerJobsTest, HelloThatWaitsIsAnsweredOnceHoweverOftenItIsSaid) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}});
  std::vector<ipc::MoverJob> jobs;
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    jobs.push_back(*job);
  }
  client_->notify(MessageKind::kBye, ipc::Empty{});
  ASSERT_TRUE(movers_[0]->next(MessageKind::kMoverCancel).has_value());
  client_ = peer(ProcessKind::kEngine, "engine again");
  const ipc::RequestId first = client_->ask(MessageKind::kEngineHello, client_hello());
  const ipc::RequestId last = client_->ask(MessageKind::kEngineHello, client_hello());
  const auto refused = client_->next(MessageKind::kEngineHello);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->request, first);
  ASSERT_TRUE(refused->error.has_value());
  EXPECT_EQ(refused->error->code, ErrorCode::kCancelled);
  movers_[0]->finish(jobs[0]);
  movers_[1]->finish(jobs[1]);
  const auto greeted = client_->next(MessageKind::kEngineHello);
  ASSERT_TRUE(greeted.has_value());
  EXPECT_EQ(greeted->request, last);
  EXPECT_FALSE(greeted->error.has_value());
}

TEST_F(ManagerJobsTest, DeadClientsReservationsGo) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ChildProcess engine = peer_child("engine", 0);
  ASSERT_TRUE(engine.wait_line("reserved", soon())) << engine.stderr_text();
  EXPECT_EQ(status()["index"]["reserved"], 1);
  engine.kill();
  ASSERT_TRUE(engine.wait(soon()).has_value());
  const ipc::Deadline deadline = soon();
  while (status()["index"]["reserved"] != 0 && !deadline.expired()) {
    // Each round is an answer of the manager, which learns of the death from the kernel.
  }
  EXPECT_EQ(status()["index"]["reserved"], 0);
  EXPECT_EQ(status()["pool"]["used"], 0);
}

TEST_F(ManagerJobsTest, NewClientIsGreetedOnlyWhenTheJobsOfTheGoneOneAreOver) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  store(1, 1);
  submit_load(2, {{GroupId{0}, BlockId{5}, key(1)}});
  std::vector<ipc::MoverJob> jobs;
  for (const auto& mover : movers_) {
    const auto job = mover->next_body<ipc::MoverJob>(MessageKind::kMoverJob);
    ASSERT_TRUE(job.has_value());
    jobs.push_back(*job);
  }
  client_->notify(MessageKind::kBye, ipc::Empty{});
  ASSERT_TRUE(movers_[0]->next(MessageKind::kMoverCancel).has_value());
  client_ = peer(ProcessKind::kEngine, "engine again");
  client_->ask(MessageKind::kEngineHello, client_hello());
  EXPECT_FALSE(client_->has(MessageKind::kEngineHello));
  movers_[0]->finish(jobs[0]);
  movers_[1]->finish(jobs[1]);
  EXPECT_TRUE(client_->next_body<ipc::EngineState>(MessageKind::kEngineHello).has_value());
}

}  // namespace
}  // namespace kvferry::test
