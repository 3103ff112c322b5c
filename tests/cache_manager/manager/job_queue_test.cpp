// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/job_queue.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

namespace kvferry::cache_manager {
namespace {

struct Waiting {
  ipc::Urgency urgency;
  std::uint32_t older = 0;      ///< In the queue when it came.
  std::uint32_t overtaken = 0;  ///< Taken since then.
};

class JobQueuePropertyTest : public testing::TestWithParam<std::uint32_t> {};

// Against a list that is searched: whoever is taken, nobody who is more urgent is left behind, but
// for the oldest one's turns; and nobody waits for more than what is promised.
TEST_P(JobQueuePropertyTest, TheMostUrgentGoesNextAndTheOldestAtItsTurn) {
  std::mt19937 random(GetParam());
  const auto below = [&random](std::uint32_t end) {
    return static_cast<std::uint32_t>(random() % end);
  };
  JobQueue queue;
  std::map<std::uint64_t, Waiting> waiting;
  std::uint64_t next = 1;
  std::uint32_t taken = 0;
  for (int step = 0; step < 4000; ++step) {
    const std::uint32_t what = below(100);
    if (what < 50 || waiting.empty()) {
      const ipc::Urgency urgency{static_cast<std::uint8_t>(below(4)),
                                 below(3) == 0 ? ipc::Urgency::kNever : std::uint64_t{below(20)}};
      queue.add(ipc::JobId{next}, urgency);
      waiting.emplace(next++, Waiting{urgency, static_cast<std::uint32_t>(waiting.size()), 0});
    } else if (what < 55) {
      const auto gone =
          std::next(waiting.begin(), below(static_cast<std::uint32_t>(waiting.size())));
      queue.remove(ipc::JobId{gone->first});
      queue.remove(ipc::JobId{gone->first});  // nothing any more
      waiting.erase(gone);
    } else {
      const auto most =
          std::min_element(waiting.begin(), waiting.end(), [](const auto& a, const auto& b) {
            return a.second.urgency.goes_before(b.second.urgency);  // of equal ones the oldest
          });
      EXPECT_EQ(queue.highest_priority(), most->second.urgency.priority);
      const bool is_oldests_turn = ++taken % JobQueue::kFairShare == 0;
      const std::uint64_t expected = is_oldests_turn ? waiting.begin()->first : most->first;
      ASSERT_EQ(queue.take([](auto /*priority*/) { return true; }).value, expected)
          << "step " << step;
      waiting.erase(expected);
      for (auto& [job, other] : waiting) {
        ++other.overtaken;
        EXPECT_LE(other.overtaken, JobQueue::kFairShare * (other.older + 1)) << "job " << job;
      }
    }
    ASSERT_EQ(queue.empty(), waiting.empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, JobQueuePropertyTest, testing::Range(1U, 9U));

}  // namespace
}  // namespace kvferry::cache_manager
