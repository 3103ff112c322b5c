// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cache_manager/manager/job_table_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <set>

namespace kvferry::cache_manager {
namespace {

using ipc::ErrorCode;
using testing::ElementsAre;
using testing::UnorderedElementsAre;

TEST_F(JobTableTest, JobEndsWhenEveryRankHasAnswered) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kStore, {4, 5}));
  ASSERT_EQ(sent_.size(), 2U);
  EXPECT_EQ(sent_[0].mover, mover(0));
  EXPECT_EQ(sent_[1].mover, mover(1));
  EXPECT_EQ(sent_[1].job.epoch, ipc::Epoch{2});
  EXPECT_EQ(sent_[0].job.direction, ipc::CopyDirection::kDeviceToHost);
  EXPECT_NE(sent_[0].job.items[0].shard_offset, sent_[1].job.items[0].shard_offset);
  answer(table, sent_[0]);
  EXPECT_TRUE(finished_.empty());
  answer(table, sent_[1]);
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(0, 0));
  EXPECT_EQ(finished_[0].bytes, 200U);
  EXPECT_EQ(table.counters(kEngine).done, 1U);
  EXPECT_EQ(table.counters(kEngine).to_host.bytes, 200U);
  EXPECT_EQ(pool_.stats().blocks, 0U);
}

TEST_F(JobTableTest, TellsWhatJobsWaitedAndTookWhateverAMoverSays) {
  using std::chrono::microseconds;
  JobTable table = make_table();
  const auto told = [&table](const Sent& sent, microseconds queued, microseconds copied) {
    ipc::MoverJobDone done;
    done.job = sent.job.job;
    done.results.assign(sent.job.items.size(), 0);
    done.queued = queued;
    done.copied = copied;
    EXPECT_TRUE(table.mover_done(sent.mover, kEngine, done).has_value());
  };
  table.submit(make_job(1, JobKind::kStore, {4}));
  // It wants the block that the first one reads, and waits for it.
  table.submit(make_job(2, JobKind::kSwapIn, {4}));
  ASSERT_EQ(sent_.size(), 2U);
  now_ += std::chrono::milliseconds(5);
  told(sent_[0], microseconds(10), microseconds(300));
  told(sent_[1], microseconds(30), microseconds(500));
  ASSERT_EQ(sent_.size(), 4U);
  told(sent_[2], microseconds(1), microseconds(-7));
  told(sent_[3], microseconds::max(), microseconds(70));
  const JobCounters counters = table.counters(kEngine);
  EXPECT_EQ(counters.to_host.answers, 2U);
  EXPECT_EQ(counters.to_host.queued, microseconds(40));
  EXPECT_EQ(counters.to_host.copied, microseconds(800));
  EXPECT_EQ(counters.to_device.answers, 2U);
  EXPECT_EQ(counters.to_device.queued, microseconds(2 * 5000 + 1) + std::chrono::hours(1));
  EXPECT_EQ(counters.to_device.copied, microseconds(70));
}

TEST_F(JobTableTest, FirstErrorOfAnyRankWins) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  answer(table, sent_[1], code(ErrorCode::kCuda));
  answer(table, sent_[0], code(ErrorCode::kRevoked));
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kCuda)));
  EXPECT_EQ(finished_[0].message, "it failed");
  EXPECT_EQ(table.counters(kEngine).failed, 1U);
}

// An engine would take its blocks for lost, while a worker or mover was being replaced.
TEST_F(JobTableTest, WhatAMoverDidNotFindIsNotTheClientsBlocks) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  answer(table, sent_[0], code(ErrorCode::kNotFound));
  answer(table, sent_[1]);
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kPeerDied)));
}

TEST_F(JobTableTest, ReplicatedPartIsStoredByOneRankAndLoadedByAll) {
  bytes_ = {.replicated_bytes = 512, .shard_bytes = 1024};
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kStore, {4, 5}));
  ASSERT_EQ(sent_.size(), 2U);
  for (std::size_t item = 0; item < 2; ++item) {
    EXPECT_EQ(sent_[0].job.items[item].with_replicated + sent_[1].job.items[item].with_replicated,
              1);
  }
  EXPECT_NE(sent_[0].job.items[0].with_replicated, sent_[0].job.items[1].with_replicated)
      << "the ranks share the work";
  table.submit(make_job(2, JobKind::kLoad, {8}));
  EXPECT_TRUE(sent_[2].job.items[0].with_replicated);
  EXPECT_TRUE(sent_[3].job.items[0].with_replicated);
}

TEST_F(JobTableTest, FullyReplicatedBlockIsStoredByOneMoverOnly) {
  bytes_ = {.replicated_bytes = 512, .shard_bytes = 0};
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kStore, {5}));
  ASSERT_EQ(sent_.size(), 1U);
  EXPECT_EQ(sent_[0].mover, mover(1));
  answer(table, sent_[0]);
  EXPECT_EQ(finished_.size(), 1U);
}

TEST_F(JobTableTest, ConflictingJobWaitsForTheFirst) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kStore, {4}));
  table.submit(make_job(2, JobKind::kLoad, {4}));
  table.submit(make_job(3, JobKind::kLoad, {5}));
  ASSERT_EQ(sent_.size(), 4U) << "jobs 1 and 3 run, 2 waits";
  answer(table, sent_[0]);
  answer(table, sent_[1]);
  EXPECT_EQ(sent_.size(), 6U);
}

// The host tier knows the block as soon as it has a place, long before every rank's shard is there.
TEST_F(JobTableTest, LoadOfWhatIsBeingStoredWaitsUntilEveryRankHasStoredIt) {
  JobTable table = make_table();
  Job store = make_job(1, JobKind::kStore, {4});
  Job load = make_job(2, JobKind::kLoad, {9});
  load.items[0].host = store.items[0].host;
  table.submit(std::move(store));
  table.submit(std::move(load));
  ASSERT_EQ(sent_.size(), 2U);
  answer(table, sent_[1]);
  EXPECT_EQ(sent_.size(), 2U) << "half of it is there";
  answer(table, sent_[0]);
  ASSERT_EQ(sent_.size(), 4U);
  EXPECT_EQ(sent_[2].job.direction, ipc::CopyDirection::kHostToDevice);
  EXPECT_EQ(sent_[2].job.items[0].shard_offset, sent_[0].job.items[0].shard_offset);
}

TEST_F(JobTableTest, StoreIntoAPlaceThatIsBeingLoadedWaitsUntilEveryRankHasLoadedIt) {
  JobTable table = make_table();
  Job load = make_job(1, JobKind::kLoad, {4});
  Job store = make_job(2, JobKind::kStore, {9});
  store.items[0].host = load.items[0].host;
  table.submit(std::move(load));
  table.submit(std::move(store));
  ASSERT_EQ(sent_.size(), 2U);
  answer(table, sent_[0]);
  EXPECT_EQ(sent_.size(), 2U) << "the other rank still reads it";
  answer(table, sent_[1]);
  EXPECT_EQ(sent_.size(), 4U);
}

TEST_F(JobTableTest, StoreOfABlockThatIsBeingLoadedWaitsUntilEveryRankHasLoadedIt) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  table.submit(make_job(2, JobKind::kStore, {4}));
  ASSERT_EQ(sent_.size(), 2U);
  answer(table, sent_[1]);
  EXPECT_EQ(sent_.size(), 2U);
  answer(table, sent_[0]);
  EXPECT_EQ(sent_.size(), 4U);
}

TEST_F(JobTableTest, StoresOfOneBlockIntoTwoPlacesRunSideBySide) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kStore, {4}));
  table.submit(make_job(2, JobKind::kStore, {4}));
  EXPECT_EQ(sent_.size(), 4U) << "both only read it";
}

TEST_F(JobTableTest, PlaceOfAFailedStoreIsGivenOnOnlyWhenItsMoverIsProvenUntouchable) {
  JobTable table = make_table();
  Job store = make_job(1, JobKind::kStore, {4});
  Job load = make_job(2, JobKind::kLoad, {9});
  load.items[0].host = store.items[0].host;
  table.submit(std::move(store));
  table.submit(std::move(load));
  answer(table, sent_[0], code(ErrorCode::kCuda));
  table.mover_died(mover(1));
  EXPECT_EQ(sent_.size(), 2U) << "the worker may still gather for it";
  table.mover_untouchable(mover(1), worker(1));
  EXPECT_EQ(sent_.size(), 4U);
}

TEST_F(JobTableTest, DeadMoversJobEndsOnlyWhenItIsProvenUntouchable) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  answer(table, sent_[0]);
  EXPECT_THAT(table.workers_used_by(mover(1)), UnorderedElementsAre(worker(1)));
  EXPECT_TRUE(table.workers_used_by(mover(0)).empty());
  table.mover_untouchable(mover(1), worker(0));
  EXPECT_TRUE(finished_.empty()) << "that was another worker";
  table.mover_untouchable(mover(1), worker(1));
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kPeerDied)));
}

TEST_F(JobTableTest, LateAnswerIsCountedAsStale) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  answer(table, sent_[0]);
  answer(table, sent_[0]);
  EXPECT_EQ(table.counters(kEngine).stale, 1U);
  EXPECT_TRUE(finished_.empty());
  answer(table, sent_[1]);
  answer(table, sent_[1]);
  EXPECT_EQ(table.counters(kEngine).stale, 2U);
  EXPECT_EQ(finished_.size(), 1U);
}

TEST_F(JobTableTest, AnswerOfTheWrongShapeIsAProtocolError) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  ipc::MoverJobDone done;
  done.job = sent_[0].job.job;
  done.results = {0, 0};
  EXPECT_EQ(table.mover_done(mover(0), kEngine, done).error().code, ErrorCode::kProtocol);
  done.results = {200};
  EXPECT_EQ(table.mover_done(mover(1), kEngine, done).error().code, ErrorCode::kProtocol);
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kProtocol)));
}

TEST_F(JobTableTest, IdsOfTwoTablesHaveNothingInCommon) {
  JobTable first = make_table();
  JobTable second = make_table();
  first.submit(make_job(1, JobKind::kLoad, {1}));
  second.submit(make_job(1, JobKind::kLoad, {2}));
  ASSERT_EQ(sent_.size(), 4U);
  const std::uint64_t a = sent_[0].job.job.value;
  const std::uint64_t b = sent_[2].job.job.value;
  EXPECT_GT(std::max(a, b) - std::min(a, b), 1'000'000'000U) << "what a clock says would be close";
}

TEST_F(JobTableTest, FullTableIsBusy) {
  JobTable table = make_table(2);
  table.submit(make_job(1, JobKind::kLoad, {1}));
  table.submit(make_job(2, JobKind::kLoad, {2}));
  EXPECT_EQ(table.check_room(kEngine).error().code, ErrorCode::kBusy);
  EXPECT_TRUE(table.check_room(kEngine + 1).has_value());
}

TEST_F(JobTableTest, UnfinishedJobIdCannotBeUsedAgain) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {1}));
  EXPECT_EQ(table.check_id(client_, ipc::JobId{1}).error().code, ErrorCode::kAlreadyExists);
}

TEST_F(JobTableTest, FinishedJobIdCannotBeUsedAgainHoweverLongAgoItWas) {
  JobTable table = make_table();
  const auto run = [&](std::uint64_t id) {
    table.submit(make_job(id, JobKind::kLoad, {}));  // Over at once.
  };
  const auto refused = [&](std::uint64_t id, const ipc::IncarnationId& client) {
    const ipc::Status status = table.check_id(client, ipc::JobId{id});
    return !status && status.error().code == ErrorCode::kAlreadyExists;
  };
  run(5);
  EXPECT_TRUE(refused(5, client_));
  EXPECT_FALSE(refused(4, client_)) << "it has not been here";
  for (std::uint64_t id = 10; id < 10'000; ++id) {
    run(id);
  }
  EXPECT_TRUE(refused(5, client_));
  EXPECT_FALSE(refused(4, client_));
  EXPECT_TRUE(refused(5000, client_));
  EXPECT_FALSE(refused(10'000, client_));
  EXPECT_FALSE(refused(5, ipc::Digest::from_words(8, 8))) << "another client's";
  table.forget_client(client_);
  EXPECT_FALSE(refused(5, client_));
}

// Else its id would be a gap between those that are over for as long as its client lives.
TEST_F(JobTableTest, WhatWasRefusedIsOver) {
  JobTable table = make_table();
  table.note_over(client_, ipc::JobId{1});
  const ipc::Status again = table.check_id(client_, ipc::JobId{1});
  ASSERT_FALSE(again.has_value());
  EXPECT_EQ(again.error().code, ErrorCode::kAlreadyExists);
  EXPECT_TRUE(table.check_id(client_, ipc::JobId{2}).has_value());
}

TEST(FinishedJobsTest, AnyOrderOfAClientsJobsEndsAsOneRun) {
  std::mt19937_64 random(7);
  std::vector<std::uint64_t> ids(500);
  std::iota(ids.begin(), ids.end(), 1U);
  std::shuffle(ids.begin(), ids.end(), random);
  FinishedJobs jobs;
  std::set<std::uint64_t> added;
  for (const std::uint64_t id : ids) {
    jobs.add(ipc::JobId{id});
    jobs.add(ipc::JobId{id});
    added.insert(id);
    for (std::uint64_t other = 0; other <= 501; ++other) {
      ASSERT_EQ(jobs.contains(ipc::JobId{other}), added.contains(other)) << other;
    }
  }
  EXPECT_EQ(jobs.runs(), 1U);
}

// A client that leaves out ids as it likes costs no more than so much.
TEST(FinishedJobsTest, RunsAreBoundedAndNothingThatIsOverIsForgotten) {
  constexpr std::uint64_t kLast = 20 * FinishedJobs::kMaxRuns;
  FinishedJobs jobs;
  for (std::uint64_t id = 2; id <= kLast; id += 2) {
    jobs.add(ipc::JobId{id});
    ASSERT_LE(jobs.runs(), FinishedJobs::kMaxRuns);
  }
  jobs.add(ipc::JobId{std::numeric_limits<std::uint64_t>::max()});
  jobs.add(ipc::JobId{0});
  for (std::uint64_t id = 2; id <= kLast; id += 2) EXPECT_TRUE(jobs.contains(ipc::JobId{id}));
  EXPECT_TRUE(jobs.contains(ipc::JobId{std::numeric_limits<std::uint64_t>::max()}));
  EXPECT_TRUE(jobs.contains(ipc::JobId{3})) << "between two runs that were made one";
  EXPECT_FALSE(jobs.contains(ipc::JobId{kLast - 1}));
  EXPECT_FALSE(jobs.contains(ipc::JobId{kLast + 2}));
}

TEST_F(JobTableTest, CancelEndsAQueuedJobAtOnceAndAsksTheMoversOfARunningOne) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  table.submit(make_job(2, JobKind::kLoad, {4}));
  EXPECT_TRUE(table.cancel(client_, ipc::JobId{2}));
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kCancelled)));
  EXPECT_TRUE(table.cancel(client_, ipc::JobId{1}));
  EXPECT_EQ(cancelled_.size(), 2U);
  EXPECT_EQ(finished_.size(), 1U);
  EXPECT_FALSE(table.cancel(client_, ipc::JobId{77}));
  EXPECT_EQ(table.counters(kEngine).cancelled, 1U);
}

TEST_F(JobTableTest, QueuedJobsOfAnOldGenerationNeverReachAMover) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  table.submit(make_job(2, JobKind::kLoad, {4}));
  generation_ = 11;
  answer(table, sent_[0], code(ErrorCode::kRevoked));
  answer(table, sent_[1], code(ErrorCode::kRevoked));
  EXPECT_EQ(sent_.size(), 2U);
  ASSERT_EQ(finished_.size(), 2U);
  EXPECT_THAT(finished_[1].results, ElementsAre(code(ErrorCode::kStaleEpoch)));
}

TEST_F(JobTableTest, FailQueuedLeavesRunningJobsAlone) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  table.submit(make_job(2, JobKind::kLoad, {4}));
  table.submit(make_job(3, JobKind::kLoad, {4}));
  table.fail_queued(kEngine, KVFERRY_ERROR(kRevoked, "cleared"));
  ASSERT_EQ(finished_.size(), 2U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kRevoked)));
  EXPECT_EQ(table.unfinished(kEngine), 1U);
  EXPECT_EQ(sent_.size(), 2U);
}

TEST_F(JobTableTest, UnreachableMoverFailsItsShareAndTheOthersAreDrained) {
  JobTable table = make_table();
  unreachable_ = mover(0);
  table.submit(make_job(1, JobKind::kLoad, {4}));
  ASSERT_EQ(sent_.size(), 1U);
  EXPECT_TRUE(finished_.empty());
  answer(table, sent_[0]);
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kPeerDied))) << "not kNotFound";
}

TEST_F(JobTableTest, ItemsThatWereRefusedKeepTheirResult) {
  JobTable table = make_table();
  Job job = make_job(1, JobKind::kLoad, {4, 5});
  job.items[0].host.reset();
  job.items[0].result = code(ErrorCode::kNotFound);
  table.submit(std::move(job));
  ASSERT_EQ(sent_.size(), 2U);
  ASSERT_EQ(sent_[0].job.items.size(), 1U);
  EXPECT_EQ(sent_[0].job.items[0].block, ipc::BlockId{5});
  answer(table, sent_[0]);
  answer(table, sent_[1]);
  EXPECT_THAT(finished_.at(0).results, ElementsAre(code(ErrorCode::kNotFound), 0));
}

TEST_F(JobTableTest, JobWithNothingToMoveEndsAtOnce) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {}));
  EXPECT_EQ(finished_.size(), 1U);
  EXPECT_EQ(table.unfinished(), 0U);
}

TEST_F(JobTableTest, LoadsAndStoresDoNotWaitForEachOther) {
  JobTable table = make_table(1000);
  for (std::uint32_t i = 0; i <= SendWindow::kJobs; ++i) {
    table.submit(make_job(i, JobKind::kLoad, {i}));
  }
  EXPECT_EQ(sent_.size(), 2U * SendWindow::kJobs) << "one load waits for room";
  for (std::uint32_t i = 100; i <= 100 + SendWindow::kJobs; ++i) {
    table.submit(make_job(i, JobKind::kStore, {i}));
  }
  EXPECT_EQ(sent_.size(), 4U * SendWindow::kJobs) << "one store waits for room";
}

TEST_F(JobTableTest, WhatIsWaitedForDoesNotWaitForWhatIsFetchedAhead) {
  JobTable table = make_table(1000);
  const auto submit = [&](std::uint32_t block, std::uint8_t priority) {
    Job job = make_job(block, JobKind::kLoad, {block});
    job.urgency.priority = priority;
    const std::size_t before = sent_.size();
    table.submit(std::move(job));
    return sent_.size() > before;
  };
  std::uint32_t next = 0;
  for (const std::uint8_t priority : {ipc::Urgency::kAhead, ipc::Urgency::kOrdinary,
                                      static_cast<std::uint8_t>(ipc::Urgency::kOrdinary + 1)}) {
    const std::uint32_t places =
        priority == ipc::Urgency::kAhead ? SendWindow::kJobs : SendWindow::kKept;
    for (std::uint32_t i = 0; i < places; ++i) EXPECT_TRUE(submit(next++, priority)) << i;
    EXPECT_FALSE(submit(next++, priority)) << "each has its places";
  }
  // Of the places of what is fetched ahead the first goes to the oldest, whose turn it was long
  // ago, and the next to what goes before it.
  const std::size_t before = sent_.size();
  for (std::size_t i = 0; i < 4; ++i) answer(table, sent_[i]);
  ASSERT_EQ(sent_.size(), before + 4);
  EXPECT_EQ(sent_[before].job.urgency.priority, ipc::Urgency::kAhead);
  EXPECT_EQ(sent_[before + 2].job.urgency.priority, ipc::Urgency::kOrdinary + 1);
}

// The turn of the oldest comes when there is room for it.
TEST_F(JobTableTest, OldestLoadsTurnDoesNotTakeWhatIsKeptForBetterOnes) {
  JobTable table = make_table(1000);
  for (std::uint32_t i = 0; i <= SendWindow::kJobs; ++i) {
    Job ahead = make_job(i, JobKind::kLoad, {i});
    ahead.urgency.priority = ipc::Urgency::kAhead;
    table.submit(std::move(ahead));
  }
  for (std::uint32_t i = 0; i < 3 * JobQueue::kFairShare; ++i) {
    Job better = make_job(500 + i, JobKind::kLoad, {500 + i});
    better.urgency.priority = ipc::Urgency::kOrdinary;
    const std::size_t before = sent_.size();
    table.submit(std::move(better));
    ASSERT_EQ(sent_.size(), before + 2);
    EXPECT_EQ(sent_.back().job.items.at(0).block.value, 500 + i);
    answer(table, sent_[before]);
    answer(table, sent_[before + 1]);
  }
  const std::size_t before = sent_.size();
  answer(table, sent_[0]);
  answer(table, sent_[1]);
  ASSERT_EQ(sent_.size(), before + 2);
  EXPECT_EQ(sent_.back().job.items.at(0).block.value, std::uint32_t{SendWindow::kJobs});
}

TEST_F(JobTableTest, OfLoadsOfOnePriorityWhatIsDueFirstGoesFirst) {
  JobTable table = make_table(1000);
  fill_window(table);
  const std::size_t before = sent_.size();
  const auto submit = [&](std::uint32_t block, std::uint8_t priority,
                          std::optional<std::chrono::seconds> due) {
    Job job = make_job(100 + block, JobKind::kLoad, {block});
    job.urgency.priority = priority;
    if (due) job.urgency.due_ns = ipc::Urgency::ns_of(now_ + *due);
    table.submit(std::move(job));
  };
  using std::chrono_literals::operator""s;
  submit(200, 1, std::nullopt);
  submit(201, 1, 9s);
  submit(202, 1, 5s);
  submit(203, 2, std::nullopt);
  submit(204, 2, 20s);
  for (std::size_t i = 0; i < 5; ++i) {
    answer(table, sent_[2 * i]);
    answer(table, sent_[2 * i + 1]);
  }
  std::vector<std::uint32_t> order;
  for (std::size_t i = before; i < sent_.size(); i += 2) {
    order.push_back(sent_[i].job.items.at(0).block.value);
  }
  EXPECT_THAT(order, ElementsAre(204, 203, 202, 201, 200));
  EXPECT_EQ(sent_[before].job.urgency.due_ns, ipc::Urgency::ns_of(now_ + 20s)) << "movers know";
}

// However many better loads keep coming, the worst one is sent.
TEST_F(JobTableTest, EveryEighthLoadIsTheOldestWhateverItsPriority) {
  JobTable table = make_table(1000);
  fill_window(table);
  table.submit(make_job(500, JobKind::kLoad, {200}));
  std::uint32_t answered = 0;
  std::vector<std::uint32_t> later;
  for (std::uint32_t i = 0; i < 2 * JobQueue::kFairShare; ++i) {
    for (std::uint32_t n = 0; n < 2; ++n) {
      Job better = make_job(600 + 2 * i + n, JobKind::kLoad, {300 + 2 * i + n});
      better.urgency.priority = 9;
      table.submit(std::move(better));
    }
    answer(table, sent_[answered++]);
    answer(table, sent_[answered++]);
    later.push_back(sent_.back().job.items.at(0).block.value);
  }
  const auto oldest = std::find(later.begin(), later.end(), 200U);
  ASSERT_NE(oldest, later.end());
  EXPECT_LT(oldest - later.begin(), JobQueue::kFairShare);
  EXPECT_EQ(std::count_if(later.begin(), oldest, [](std::uint32_t b) { return b < 300; }), 0)
      << "priority counts for all others";
}

TEST_F(JobTableTest, OrphansAreCancelledAndCountUntilTheyAreOver) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  table.submit(make_job(2, JobKind::kLoad, {4}));
  table.orphan(client_);
  EXPECT_EQ(cancelled_.size(), 2U);
  EXPECT_TRUE(table.has_orphans(kEngine));
  answer(table, sent_[0], code(ErrorCode::kCancelled));
  answer(table, sent_[1], code(ErrorCode::kCancelled));
  EXPECT_FALSE(table.has_orphans(kEngine));
}

// Random jobs, answers, deaths and cancels: each job ends exactly once, and nothing is left.
TEST_F(JobTableTest, EveryRandomJobEndsExactlyOnce) {
  std::mt19937 random(11);
  JobTable table = make_table(10'000);
  std::size_t answered = 0;
  std::uint64_t submitted = 0;
  for (int step = 0; step < 5000; ++step) {
    const auto dice = random() % 10;
    if (dice < 4 && submitted < 1000) {
      std::set<std::uint32_t> blocks;
      for (std::uint32_t i = 0, n = static_cast<std::uint32_t>(1 + random() % 4); i < n; ++i) {
        blocks.insert(static_cast<std::uint32_t>(random() % 40));
      }
      table.submit(make_job(++submitted, random() % 2 == 0 ? JobKind::kStore : JobKind::kLoad,
                            {blocks.begin(), blocks.end()}));
    } else if (dice < 9) {
      if (answered < sent_.size()) {
        const Sent sent = sent_[answered++];
        answer(table, sent, random() % 10 == 0 ? code(ErrorCode::kCuda) : 0);
      }
    } else if (submitted > 0) {
      (void)table.cancel(client_, ipc::JobId{1 + random() % submitted});
    }
  }
  while (answered < sent_.size()) {
    const Sent sent = sent_[answered++];
    answer(table, sent);
  }
  EXPECT_EQ(finished_.size(), submitted);
  std::set<std::uint64_t> distinct;
  for (const Finished& job : finished_) {
    distinct.insert(job.client_job);
  }
  EXPECT_EQ(distinct.size(), submitted);
  EXPECT_EQ(table.unfinished(), 0U);
  EXPECT_EQ(pool_.stats().blocks, 0U);
  const JobCounters counters = table.counters(kEngine);
  EXPECT_EQ(counters.queued, 0U);
  EXPECT_EQ(counters.running, 0U);
  EXPECT_EQ(counters.done + counters.failed + counters.cancelled, submitted);
}

TEST_F(JobTableTest, MoverThatConnectsAnewHasEndedWhatItDidNotAnswer) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  table.submit(make_job(2, JobKind::kLoad, {4}));
  ASSERT_EQ(sent_.size(), 2U) << "the second one waits for the block";
  answer(table, sent_[1]);
  table.mover_rejoined(mover(1));
  EXPECT_TRUE(finished_.empty()) << "it had answered; the other rank's mover has not";
  table.mover_rejoined(mover(0));
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kPeerDied)));
  EXPECT_EQ(sent_.size(), 4U) << "the block is given on";
}

}  // namespace
}  // namespace kvferry::cache_manager
