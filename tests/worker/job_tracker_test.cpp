// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "job_tracker.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace kvferry::worker {
namespace {

using ipc::Epoch;
using ipc::SessionId;
using testing::Each;
using testing::ElementsAre;

const SessionId kFirst = SessionId::from_words(0, 1);
const SessionId kSecond = SessionId::from_words(0, 2);
const ArenaId kArenaA{SessionId::from_words(7, 7), Epoch{1}};
const ArenaId kArenaB{SessionId::from_words(7, 7), Epoch{2}};
constexpr auto kDied = static_cast<std::uint8_t>(ErrorCode::kPeerDied);
constexpr auto kBadReply = static_cast<std::uint8_t>(ErrorCode::kProtocol);

DeviceBlock block(std::uint32_t id, std::uint32_t group = 0) {
  return {GroupId{group}, BlockId{id}};
}

JobId add_job(JobTracker& tracker,
              std::vector<DeviceBlock> blocks,
              const SessionId& manager = kFirst) {
  const JobId job = tracker.next_id();
  tracker.add(job, manager, blocks);
  return job;
}

TEST(JobTrackerTest, CompletionCarriesTheResultsPerItem) {
  JobTracker tracker;
  const JobId job = add_job(tracker, {block(1), block(2)});
  ASSERT_TRUE(tracker.finish(job, {0, kDied}, "half", 42));
  const auto done = tracker.take(10);
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0].job, job);
  EXPECT_THAT(done[0].results, ElementsAre(0, kDied));
  EXPECT_EQ(done[0].message, "half");
  EXPECT_EQ(done[0].bytes, 42U);
  EXPECT_FALSE(done[0].all_ok());
}

TEST(JobTrackerTest, SecondCompletionOfAJobIsUnknown) {
  JobTracker tracker;
  const JobId job = add_job(tracker, {block(1)});
  ASSERT_TRUE(tracker.finish(job, {0}, "", 0));
  EXPECT_FALSE(tracker.finish(job, {0}, "", 0));
  EXPECT_EQ(tracker.take(10).size(), 1U);
}

TEST(JobTrackerTest, ResultsOfTheWrongCountEndTheJobAsProtocolError) {
  JobTracker tracker;
  const JobId job = add_job(tracker, {block(1), block(2)});
  ASSERT_TRUE(tracker.finish(job, {0}, "", 0));
  EXPECT_THAT(tracker.take(1).at(0).results, ElementsAre(kBadReply, kBadReply));
}

TEST(JobTrackerTest, UnknownErrorCodeEndsTheJobAsProtocolError) {
  JobTracker tracker;
  const JobId job = add_job(tracker, {block(1)});
  ASSERT_TRUE(tracker.finish(job, {255}, "", 0));
  EXPECT_THAT(tracker.take(1).at(0).results, ElementsAre(kBadReply));
}

TEST(JobTrackerTest, TakeJobLeavesOtherCompletions) {
  JobTracker tracker;
  const JobId first = add_job(tracker, {block(1)});
  const JobId second = add_job(tracker, {block(2)});
  ASSERT_TRUE(tracker.finish(first, {0}, "", 0));
  ASSERT_TRUE(tracker.finish(second, {0}, "", 0));
  EXPECT_EQ(tracker.take_job(second)->job, second);
  EXPECT_FALSE(tracker.take_job(second).has_value());
  EXPECT_EQ(tracker.take(10).at(0).job, first);
}

TEST(JobTrackerTest, ReleaseIsImmediateForUntouchedBlocks) {
  JobTracker tracker;
  add_job(tracker, {block(1)});
  // Block 1 of another group is another block.
  const std::vector blocks{block(2), block(1, 1)};
  EXPECT_TRUE(tracker.release_when_done(blocks, [] { FAIL(); }));
}

TEST(JobTrackerTest, ReleaseWaitsForEveryTouchingJobButNotForLaterOnes) {
  JobTracker tracker;
  const JobId first = add_job(tracker, {block(1), block(2)});
  const JobId second = add_job(tracker, {block(2), block(2)});
  const std::vector blocks{block(1), block(2)};
  ASSERT_FALSE(tracker.release_when_done(blocks, [] {}));
  const JobId later = add_job(tracker, {block(1)});
  ASSERT_TRUE(tracker.finish(first, {0, 0}, "", 0));
  EXPECT_TRUE(tracker.take_released().empty());
  ASSERT_TRUE(tracker.finish(second, {0, 0}, "", 0));
  EXPECT_EQ(tracker.take_released().size(), 1U);
  EXPECT_TRUE(tracker.is_unfinished(later));
}

TEST(JobTrackerTest, OrphansStayWhileTheNewManagerHasNoMovers) {
  JobTracker tracker;
  const JobId job = add_job(tracker, {block(1)});
  tracker.orphan_all({kArenaA});
  EXPECT_EQ(tracker.settle_orphans(kSecond, false, {kArenaA}), 0U);
  EXPECT_TRUE(tracker.is_unfinished(job));
  const std::vector blocks{block(1)};
  EXPECT_FALSE(tracker.release_when_done(blocks, [] {}));
}

TEST(JobTrackerTest, OrphansStayWhenTheirOwnManagerComesBackReady) {
  JobTracker tracker;
  add_job(tracker, {block(1)});
  tracker.orphan_all({kArenaA});
  EXPECT_EQ(tracker.settle_orphans(kFirst, true, {kArenaA}), 0U);
}

TEST(JobTrackerTest, OrphansDieWhenTheirOwnManagerGreetsAgain) {
  JobTracker tracker;
  add_job(tracker, {block(1)});
  tracker.orphan_all({kArenaA});
  const JobId running = add_job(tracker, {block(2)});
  EXPECT_EQ(tracker.settle_greeted(kSecond), 0U);
  EXPECT_EQ(tracker.settle_greeted(kFirst), 1U);
  EXPECT_TRUE(tracker.is_unfinished(running));
}

TEST(JobTrackerTest, OrphansDieWhenANewManagerIsOffloadReady) {
  JobTracker tracker;
  const JobId job = add_job(tracker, {block(1), block(2)});
  tracker.orphan_all({kArenaA});
  const JobId fresh = add_job(tracker, {block(3)}, kSecond);
  EXPECT_EQ(tracker.settle_orphans(kSecond, true, {kArenaA}), 1U);
  const auto done = tracker.take(10);
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0].job, job);
  EXPECT_THAT(done[0].results, Each(kDied));
  EXPECT_TRUE(tracker.is_unfinished(fresh));
  EXPECT_FALSE(tracker.has_orphans());
}

TEST(JobTrackerTest, OrphansDieWhenEveryArenaIsAnotherOne) {
  JobTracker tracker;
  add_job(tracker, {block(1)});
  tracker.orphan_all({kArenaA, kArenaA});
  EXPECT_EQ(tracker.settle_orphans(kFirst, false, {kArenaB, kArenaA}), 0U);
  EXPECT_EQ(tracker.settle_orphans(kFirst, false, {kArenaB, ArenaId{}}), 0U);
  EXPECT_EQ(tracker.settle_orphans(kFirst, false, {kArenaB, kArenaB}), 1U);
}

TEST(JobTrackerTest, LateCompletionOfAnOrphanStillCounts) {
  JobTracker tracker;
  const JobId job = add_job(tracker, {block(1)});
  tracker.orphan_all({kArenaA});
  EXPECT_TRUE(tracker.finish(job, {0}, "", 8));
  EXPECT_FALSE(tracker.has_orphans());
  EXPECT_TRUE(tracker.take(1).at(0).all_ok());
}

/// Random jobs over few blocks, against the plain definition: a release comes exactly when the last
/// of the jobs that touched its blocks at the time of asking has ended.
TEST(JobTrackerTest, ReleasesMatchTheirDefinitionOverRandomHistories) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    JobTracker tracker;
    std::map<std::uint64_t, std::set<std::uint32_t>> running;
    std::map<int, std::set<std::uint64_t>> waiting;
    std::set<int> released;
    int next_waiter = 0;
    for (int round = 0; round < 400; ++round) {
      const auto pick = random() % 3;
      std::vector<DeviceBlock> blocks;
      std::set<std::uint32_t> ids;
      for (std::uint32_t i = 0; i <= random() % 4; ++i) {
        ids.insert(static_cast<std::uint32_t>(random() % 6));
      }
      for (const std::uint32_t id : ids) blocks.push_back(block(id));
      if (pick == 0) {
        running[add_job(tracker, blocks).value] = ids;
      } else if (pick == 1 && !running.empty()) {
        auto job =
            std::next(running.begin(), static_cast<std::ptrdiff_t>(random() % running.size()));
        ASSERT_TRUE(tracker.finish_all_items(JobId{job->first}, ErrorCode::kRevoked, ""));
        for (auto& [waiter, jobs] : waiting) jobs.erase(job->first);
        running.erase(job);
      } else {
        std::set<std::uint64_t> touching;
        for (const auto& [job, touched] : running) {
          for (const std::uint32_t id : ids) {
            if (touched.contains(id)) touching.insert(job);
          }
        }
        const int waiter = next_waiter++;
        const bool at_once =
            tracker.release_when_done(blocks, [&released, waiter] { released.insert(waiter); });
        ASSERT_EQ(at_once, touching.empty());
        if (!at_once) waiting[waiter] = touching;
      }
      for (const auto& call : tracker.take_released()) call();
      for (const auto& [waiter, jobs] : waiting) {
        ASSERT_EQ(released.contains(waiter), jobs.empty()) << "seed " << seed;
      }
    }
  }
}

}  // namespace
}  // namespace kvferry::worker
