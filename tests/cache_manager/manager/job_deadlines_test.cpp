// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// When a job table gives up: queued jobs, lanes that stand still, movers that do not.
#include "cache_manager/manager/job_table_fixture.hpp"

#include <gmock/gmock.h>

namespace kvferry::cache_manager {
namespace {

using ipc::ErrorCode;
using testing::ElementsAre;
using testing::UnorderedElementsAre;

using JobDeadlinesTest = JobTableTest;

TEST_F(JobDeadlinesTest, JobThatCannotBeSentInTimeEndsTyped) {
  JobTable table = make_table(1000);
  table.submit(make_job(1, JobKind::kLoad, {4}));
  now_ += kQueueDeadline / 2;
  table.submit(make_job(2, JobKind::kLoad, {4}));  // Waits for the block.
  for (std::uint32_t i = 0; i < SendWindow::kJobs; ++i) {
    table.submit(make_job(100 + i, JobKind::kLoad, {100 + i}));  // The last one waits for room.
  }
  const std::size_t sent = sent_.size();
  const auto answer_something = [&] { answer(table, sent_.at(2)); };
  answer_something();
  now_ += kQueueDeadline - std::chrono::milliseconds(1);
  (void)table.expire();
  const auto has_ended = [&](std::uint64_t job) {
    return std::any_of(finished_.begin(), finished_.end(),
                       [&](const Finished& f) { return f.client_job == job; });
  };
  EXPECT_FALSE(has_ended(2));
  now_ += std::chrono::milliseconds(1);
  (void)table.expire();
  EXPECT_TRUE(has_ended(2));
  EXPECT_TRUE(has_ended(100 + SendWindow::kJobs - 1));
  for (const Finished& job : finished_) {
    EXPECT_THAT(job.results, ElementsAre(code(ErrorCode::kTimeout))) << job.client_job;
  }
  EXPECT_EQ(sent_.size(), sent);
  EXPECT_EQ(table.counters(kEngine).queued, 0U);
}

TEST_F(JobDeadlinesTest, JobThatIsDueBeforeItIsSentEndsThenAndOneThatWasSentGoesOn) {
  JobTable table = make_table(1000);
  const auto submit = [&](std::uint32_t number, ipc::TimePoint due) {
    Job job = make_job(number, JobKind::kLoad, {number});
    job.urgency.due_ns = ipc::Urgency::ns_of(due);
    table.submit(std::move(job));
  };
  const ipc::TimePoint due = now_ + kQueueDeadline / 4;
  for (std::uint32_t i = 0; i < SendWindow::kJobs; ++i) submit(i, due);
  submit(500, due);
  submit(501, now_ + 10 * kQueueDeadline);  // not before the table's own limit
  const std::size_t sent = sent_.size();
  EXPECT_EQ(sent, 2U * SendWindow::kJobs);
  now_ = due - std::chrono::milliseconds(1);
  (void)table.expire();
  EXPECT_THAT(finished_, testing::IsEmpty());
  now_ = due;
  (void)table.expire();
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_EQ(finished_[0].client_job, 500U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kTimeout)));
  EXPECT_THAT(finished_[0].message, testing::HasSubstr("deadline"));
  EXPECT_EQ(table.unfinished(), SendWindow::kJobs + 1U);
  submit(502, now_ - std::chrono::seconds(1));
  (void)table.expire();
  EXPECT_EQ(finished_.back().client_job, 502U) << "due before it came";
  EXPECT_EQ(sent_.size(), sent);
}

TEST_F(JobDeadlinesTest, JobThatIsDueAlreadyIsNotSentAlthoughThereIsRoom) {
  JobTable table = make_table();
  Job job = make_job(1, JobKind::kLoad, {4});
  job.urgency.due_ns = ipc::Urgency::ns_of(now_);
  table.submit(std::move(job));
  EXPECT_THAT(sent_, testing::IsEmpty());
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kTimeout)));
  EXPECT_EQ(table.unfinished(), 0U);
  EXPECT_EQ(pool_.stats().blocks, 0U);
}

TEST_F(JobDeadlinesTest, MoverThatGetsOnIsLeftAloneHoweverLongAJobWaits) {
  JobTable table = make_table(1000);
  table.submit(make_job(1, JobKind::kLoad, {4}));  // The mover prefers all others.
  for (std::uint32_t i = 0; i < 2 * JobTable::kPatience - 1; ++i) {
    table.submit(make_job(100 + i, JobKind::kLoad, {100 + i}));
    now_ += kJobDeadline / 2;
    answer(table, sent_[sent_.size() - 2]);
    answer(table, sent_[sent_.size() - 1]);
    EXPECT_THAT(table.expire(), testing::IsEmpty());
  }
  EXPECT_THAT(cancelled_, testing::IsEmpty());
  EXPECT_EQ(table.unfinished(), 1U);
}

TEST_F(JobDeadlinesTest, JobsOfALaneThatStandsStillAreCancelledAndEndTyped) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  answer(table, sent_[0]);
  now_ += kJobDeadline / 2;
  table.submit(make_job(2, JobKind::kLoad, {5}));  // Has time left.
  table.submit(make_job(3, JobKind::kStore, {6}));
  ASSERT_EQ(table.next_deadline(), now_ + kJobDeadline / 2);
  EXPECT_THAT(table.expire(), testing::IsEmpty());
  now_ = *table.next_deadline();
  EXPECT_THAT(table.expire(), testing::IsEmpty());
  ASSERT_EQ(cancelled_.size(), 1U);
  EXPECT_EQ(cancelled_[0], std::pair(mover(1), sent_[1].job.job));
  EXPECT_TRUE(finished_.empty()) << "the mover may still copy";
  answer(table, sent_[1], code(ErrorCode::kCancelled));
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kTimeout)));
  EXPECT_EQ(table.counters(kEngine).failed, 1U);
}

TEST_F(JobDeadlinesTest, MoverThatDoesNotGiveUpEitherIsStuckAndNamedOnce) {
  JobTable table = make_table();
  table.submit(make_job(1, JobKind::kLoad, {4}));
  answer(table, sent_[0]);
  now_ += kJobDeadline;
  EXPECT_THAT(table.expire(), testing::IsEmpty());
  now_ += kJobDeadline - std::chrono::milliseconds(1);
  EXPECT_THAT(table.expire(), testing::IsEmpty());
  now_ += std::chrono::milliseconds(1);
  EXPECT_THAT(table.expire(), ElementsAre(mover(1)));
  now_ += kJobDeadline;
  EXPECT_THAT(table.expire(), testing::IsEmpty());
  table.mover_untouchable(mover(1), worker(1));
  ASSERT_EQ(finished_.size(), 1U);
  EXPECT_THAT(finished_[0].results, ElementsAre(code(ErrorCode::kPeerDied)));
}

// A hung lane: its mover still takes jobs out of the queue when it is told to.
TEST_F(JobDeadlinesTest, GivingUpJobsThatWereNeverStartedIsNoProgress) {
  JobTable table = make_table();
  ranks_ = 1;
  table.submit(make_job(1, JobKind::kLoad, {4}));
  table.submit(make_job(2, JobKind::kLoad, {5}));
  now_ += kJobDeadline;
  EXPECT_THAT(table.expire(), testing::IsEmpty());
  EXPECT_EQ(cancelled_.size(), 2U);
  now_ += kJobDeadline / 2;
  answer(table, sent_[1], code(ErrorCode::kCancelled));
  now_ += kJobDeadline / 2;
  EXPECT_THAT(table.expire(), ElementsAre(mover(0)));
}

TEST_F(JobDeadlinesTest, MoverThatAnswersInTheOtherDirectionIsNotStuckButMayNotKeepAJobForEver) {
  JobTable table = make_table();
  ranks_ = 1;
  table.submit(make_job(1, JobKind::kLoad, {4}));
  const ipc::TimePoint start = now_;
  std::vector<ipc::IncarnationId> stuck;
  for (std::uint32_t i = 0; stuck.empty() && i < 100; ++i) {
    table.submit(make_job(100 + i, JobKind::kStore, {10}));
    now_ += kJobDeadline / 2;
    answer(table, sent_.back());
    stuck = table.expire();
  }
  EXPECT_THAT(stuck, ElementsAre(mover(0)));
  EXPECT_EQ(now_, start + 2 * JobTable::kPatience * kJobDeadline);
  EXPECT_FALSE(cancelled_.empty());
}

TEST_F(JobDeadlinesTest, MoverWhoseWorkerIsStoppedIsLeftAlone) {
  JobTable table = make_table();
  ranks_ = 1;
  table.submit(make_job(1, JobKind::kLoad, {4}));
  stopped_ = worker(0);
  for (int i = 0; i < 3 * JobTable::kPatience; ++i) {
    now_ += kJobDeadline;
    EXPECT_THAT(table.expire(), testing::IsEmpty());
  }
  EXPECT_FALSE(cancelled_.empty());
  stopped_ = {};
  now_ += kJobDeadline;
  EXPECT_THAT(table.expire(), ElementsAre(mover(0)));
}

TEST_F(JobDeadlinesTest, NoDeadlineCountsForADeadMover) {
  JobTable table = make_table();
  ranks_ = 1;
  table.submit(make_job(1, JobKind::kLoad, {4}));
  table.mover_died(mover(0));
  now_ += kJobDeadline;
  EXPECT_THAT(table.expire(), testing::IsEmpty());
  EXPECT_THAT(cancelled_, testing::IsEmpty());
}

}  // namespace
}  // namespace kvferry::cache_manager
