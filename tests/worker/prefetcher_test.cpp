// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/prefetcher.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::JobId;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::TimePoint kStart{std::chrono::hours(1)};

/// Takes jobs as a client does, and answers them as the test says.
class FakeClient {
 public:
  Prefetcher::Transport transport() {
    return {[this](std::span<const LoadItem> items, std::uint8_t priority,
                   std::optional<ipc::TimePoint> due) -> ipc::Result<JobId> {
              if (refuses) return KVFERRY_ERROR(kBusy, "the queue is full");
              const JobId job{next_++};
              jobs[job.value] = {items.begin(), items.end()};
              priorities.insert(priority);
              dues[job.value] = due;
              return job;
            },
            [this](JobId job) { cancelled.insert(job.value); }};
  }
  /// The completion of the oldest job; result 0 is a loaded block.
  Completion end_oldest(std::uint8_t result = 0) {
    return end(jobs.begin()->first, std::vector<std::uint8_t>(jobs.begin()->second.size(), result));
  }
  Completion end(std::uint64_t job, std::vector<std::uint8_t> results) {
    jobs.erase(job);
    Completion completion;
    completion.job = JobId{job};
    completion.results = std::move(results);
    completion.bytes = 100;
    return completion;
  }

  std::map<std::uint64_t, std::vector<LoadItem>> jobs;
  std::set<std::uint64_t> cancelled;
  std::set<std::uint8_t> priorities;
  std::map<std::uint64_t, std::optional<ipc::TimePoint>> dues;
  bool refuses = false;

 private:
  std::uint64_t next_ = 1;
};

std::vector<LoadItem> items(std::uint32_t count, std::uint32_t first = 0) {
  std::vector<LoadItem> made;
  for (std::uint32_t i = first; i < first + count; ++i) {
    made.push_back({GroupId{0}, BlockId{i}, Digest::from_words(1, i)});
  }
  return made;
}

class PrefetcherTest : public testing::Test {
 protected:
  Prefetcher& make(PrefetchOptions options) {
    options.blocks_per_job = 4;
    prefetcher_.emplace(options, client_.transport());
    return *prefetcher_;
  }
  FakeClient client_;
  std::optional<Prefetcher> prefetcher_;
};

TEST_F(PrefetcherTest, EveryStopIsReadBackAndOthersAreRefused) {
  for (const auto stop : {PrefetchStop::kBestEffort, PrefetchStop::kWait, PrefetchStop::kTimeout}) {
    const auto parsed = parse_prefetch_stop(to_string(stop));
    ASSERT_TRUE(parsed);
    EXPECT_EQ(*parsed, stop);
  }
  EXPECT_FALSE(parse_prefetch_stop("never"));
}

TEST_F(PrefetcherTest, ItLoadsFrontToBackAFewJobsAtATimeBelowThePriorityOfLoads) {
  Prefetcher& sut = make({});
  ASSERT_TRUE(sut.begin(1, items(10), kStart));
  EXPECT_EQ(client_.jobs.size(), 2U);
  EXPECT_EQ(client_.priorities, std::set<std::uint8_t>{ipc::Urgency::kAhead});
  std::vector<std::uint32_t> order;
  while (!client_.jobs.empty()) {
    const auto landing = sut.on_completion(client_.end_oldest(), kStart);
    ASSERT_TRUE(landing);
    EXPECT_TRUE(landing->wanted);
    EXPECT_EQ(landing->bytes, 100U);
    for (std::size_t i = 0; i < landing->items.size(); ++i) {
      EXPECT_EQ(landing->results[i], 0);
      order.push_back(landing->items[i].block.value);
    }
    EXPECT_LE(client_.jobs.size(), 2U);
  }
  EXPECT_EQ(order, (std::vector<std::uint32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(sut.counts().arrived, 10U);
  EXPECT_TRUE(sut.turn(1, kStart).starts);
  EXPECT_EQ(sut.under_way(), 0U);
}

TEST_F(PrefetcherTest, BestEffortStartsAtOnceAndWhatWasUnderWayLandsUnwanted) {
  Prefetcher& sut = make({.stop = PrefetchStop::kBestEffort});
  ASSERT_TRUE(sut.begin(1, items(12), kStart));
  ASSERT_TRUE(sut.on_completion(client_.end_oldest(), kStart));
  EXPECT_TRUE(sut.turn(1, kStart).starts);
  const auto running = client_.jobs;
  EXPECT_TRUE(sut.stop(1).empty());
  EXPECT_EQ(client_.cancelled.size(), running.size());
  EXPECT_FALSE(sut.is_known(1));
  while (!client_.jobs.empty()) {
    const auto landing = sut.on_completion(client_.end_oldest(), kStart);
    ASSERT_TRUE(landing);
    EXPECT_FALSE(landing->wanted);
  }
  EXPECT_EQ(sut.counts().arrived, 4U);
  EXPECT_EQ(sut.counts().cancelled, 8U);
  EXPECT_EQ(sut.under_way(), 0U);
}

TEST_F(PrefetcherTest, StoppingGivesBackWhatWasNeverSent) {
  Prefetcher& sut = make({});
  ASSERT_TRUE(sut.begin(1, items(12), kStart));
  const std::vector<LoadItem> unsent = sut.stop(1);
  ASSERT_EQ(unsent.size(), 4U);
  EXPECT_EQ(unsent.front().block.value, 8U);
  EXPECT_TRUE(sut.stop(1).empty());
}

TEST_F(PrefetcherTest, WaitStartsWhenAllHasComeOrAtItsDeadline) {
  Prefetcher& sut = make({.stop = PrefetchStop::kWait, .wait_limit = 2s});
  ASSERT_TRUE(sut.begin(1, items(4), kStart));
  const Prefetcher::Turn turn = sut.turn(1, kStart + 1s);
  EXPECT_FALSE(turn.starts);
  EXPECT_EQ(turn.look_again, kStart + 2s);
  EXPECT_TRUE(sut.turn(1, kStart + 2s).starts);
  ASSERT_TRUE(sut.on_completion(client_.end_oldest(), kStart + 1s));
  EXPECT_TRUE(sut.turn(1, kStart + 1s).starts);
}

TEST_F(PrefetcherTest, TimeoutWaitsForSoLongAsItsBlocksAreWorth) {
  Prefetcher& sut =
      make({.stop = PrefetchStop::kTimeout, .timeout = 10ms, .timeout_per_block = 5ms});
  ASSERT_TRUE(sut.begin(1, items(4), kStart));
  ASSERT_TRUE(sut.begin(2, items(8, 100), kStart));
  EXPECT_FALSE(sut.turn(1, kStart + 29ms).starts);
  EXPECT_TRUE(sut.turn(1, kStart + 30ms).starts);
  EXPECT_FALSE(sut.turn(2, kStart + 49ms).starts);
  EXPECT_EQ(sut.turn(2, kStart + 49ms).look_again, kStart + 50ms);
}

TEST_F(PrefetcherTest, JobsThatAreWaitedForAreDueWhenTheWaitEnds) {
  Prefetcher& timed = make({.stop = PrefetchStop::kWait, .wait_limit = 2s});
  ASSERT_TRUE(timed.begin(1, items(4), kStart));
  EXPECT_EQ(client_.dues.at(1), kStart + 2s);
  Prefetcher& best = make({.stop = PrefetchStop::kBestEffort});
  ASSERT_TRUE(best.begin(2, items(4), kStart));
  EXPECT_FALSE(client_.dues.at(2).has_value());
}

TEST_F(PrefetcherTest, BehindABlockThatDidNotComeNothingMoreIsSentAndEachSaysWhatBecameOfIt) {
  Prefetcher& sut = make({.stop = PrefetchStop::kWait});
  ASSERT_TRUE(sut.begin(1, items(20), kStart));
  const auto missing = static_cast<std::uint8_t>(ErrorCode::kNotFound);
  const auto landing = sut.on_completion(client_.end(1, {0, missing, 0, 0}), kStart);
  ASSERT_TRUE(landing);
  EXPECT_EQ(landing->items.size(), 4U + 12U);  // With those that were never sent.
  std::vector<std::uint8_t> results = {0, missing, 0, 0};
  results.resize(4 + 12, static_cast<std::uint8_t>(ErrorCode::kCancelled));
  EXPECT_EQ(landing->results, results);
  EXPECT_EQ(client_.jobs.size(), 1U);
  EXPECT_FALSE(sut.turn(1, kStart).starts);
  ASSERT_TRUE(sut.on_completion(client_.end_oldest(), kStart));
  EXPECT_TRUE(sut.turn(1, kStart).starts);
  EXPECT_TRUE(sut.stop(1).empty());
  EXPECT_EQ(sut.counts().failed, 13U);
}

TEST_F(PrefetcherTest, ARefusedPrefetchIsNoneAndAnotherOnesJobIsNotIts) {
  Prefetcher& sut = make({});
  client_.refuses = true;
  const auto refused = sut.begin(1, items(4), kStart);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kBusy);
  EXPECT_FALSE(sut.is_known(1));
  EXPECT_EQ(sut.counts().requests, 0U);
  Completion other;
  other.job = JobId{99};
  EXPECT_FALSE(sut.on_completion(other, kStart));
  EXPECT_TRUE(sut.turn(7, kStart).starts);
}

// Whatever ends when and is stopped when: every block lands once, or comes back from stop().
TEST_F(PrefetcherTest, EveryBlockIsGivenBackExactlyOnce) {
  std::mt19937_64 random(4);
  Prefetcher& sut = make({});
  std::map<std::uint32_t, int> given_back;
  std::uint32_t next = 0;
  std::vector<Prefetcher::Id> live;
  Prefetcher::Id id = 1;
  const auto land = [&] {
    auto job = client_.jobs.begin();
    std::advance(job, static_cast<std::ptrdiff_t>(random() % client_.jobs.size()));
    std::vector<std::uint8_t> results(job->second.size());
    for (auto& result : results) result = random() % 10 == 0 ? 1 : 0;
    const auto landing = sut.on_completion(client_.end(job->first, results), kStart);
    ASSERT_TRUE(landing);
    for (const LoadItem& item : landing->items) ++given_back[item.block.value];
  };
  for (int i = 0; i < 3000; ++i) {
    client_.refuses = random() % 8 == 0;
    const auto what = random() % 3;
    if (what == 0) {
      const auto count = static_cast<std::uint32_t>(1 + random() % 30);
      if (sut.begin(id, items(count, next), kStart)) {
        next += count;
        live.push_back(id);
      }
      ++id;
    } else if (what == 1 && !live.empty()) {
      const std::size_t which = random() % live.size();
      for (const LoadItem& item : sut.stop(live[which])) ++given_back[item.block.value];
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(which));
    } else if (!client_.jobs.empty()) {
      land();
    }
  }
  for (const Prefetcher::Id one : live) {
    for (const LoadItem& item : sut.stop(one)) ++given_back[item.block.value];
  }
  while (!client_.jobs.empty()) land();
  ASSERT_EQ(given_back.size(), next);
  for (const auto& [block, times] : given_back) EXPECT_EQ(times, 1) << block;
  const PrefetchCounts& counts = sut.counts();
  EXPECT_EQ(counts.asked, counts.arrived + counts.failed + counts.cancelled);
}

}  // namespace
}  // namespace kvferry::worker
