// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/hazard_tracker.hpp"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <random>

namespace kvferry::cache_manager {
namespace {

Place block(std::uint32_t index) { return Place::device(1, ipc::GroupId{0}, ipc::BlockId{index}); }
Claim read(std::uint32_t index) { return {block(index), Access::kRead}; }
Claim write(std::uint32_t index) { return {block(index), Access::kWrite}; }
ipc::JobId job(std::uint64_t id) { return ipc::JobId{id}; }

TEST(HazardTrackerTest, ReadersShareAPlace) {
  HazardTracker hazards;
  EXPECT_TRUE(hazards.add(job(1), std::vector<Claim>{read(5)}));
  EXPECT_TRUE(hazards.add(job(2), std::vector<Claim>{read(5)}));
}

TEST(HazardTrackerTest, WriterWaitsForAllReaders) {
  HazardTracker hazards;
  ASSERT_TRUE(hazards.add(job(1), std::vector<Claim>{read(5)}));
  ASSERT_TRUE(hazards.add(job(2), std::vector<Claim>{read(5)}));
  EXPECT_FALSE(hazards.add(job(3), std::vector<Claim>{write(5)}));
  EXPECT_TRUE(hazards.remove(job(1)).empty());
  EXPECT_EQ(hazards.remove(job(2)), std::vector{job(3)});
}

TEST(HazardTrackerTest, LaterReaderDoesNotOvertakeAWaitingWriter) {
  HazardTracker hazards;
  ASSERT_TRUE(hazards.add(job(1), std::vector<Claim>{read(5)}));
  ASSERT_FALSE(hazards.add(job(2), std::vector<Claim>{write(5)}));
  EXPECT_FALSE(hazards.add(job(3), std::vector<Claim>{read(5)}));
  EXPECT_EQ(hazards.remove(job(1)), std::vector{job(2)});
  EXPECT_EQ(hazards.remove(job(2)), std::vector{job(3)});
}

TEST(HazardTrackerTest, RemovingAWaitingWriterLetsReadersGo) {
  HazardTracker hazards;
  ASSERT_TRUE(hazards.add(job(1), std::vector<Claim>{read(5)}));
  ASSERT_FALSE(hazards.add(job(2), std::vector<Claim>{write(5)}));
  ASSERT_FALSE(hazards.add(job(3), std::vector<Claim>{read(5)}));
  EXPECT_EQ(hazards.remove(job(2)), std::vector{job(3)});
}

TEST(HazardTrackerTest, HostSlotsAndDeviceBlocksAreDifferentPlaces) {
  HazardTracker hazards;
  ASSERT_TRUE(hazards.add(job(1), std::vector<Claim>{{Place::host_slot(1, 5), Access::kWrite}}));
  EXPECT_TRUE(hazards.add(job(2), std::vector<Claim>{{Place::host_slot(2, 5), Access::kWrite}}));
  EXPECT_TRUE(hazards.add(
      job(3),
      std::vector<Claim>{{Place::device(0, ipc::GroupId{1}, ipc::BlockId{5}), Access::kWrite}}));
}

TEST(HazardTrackerTest, SeveralClaimsOnOnePlaceCountAsTheStrongest) {
  HazardTracker hazards;
  EXPECT_TRUE(hazards.add(job(1), std::vector<Claim>{read(5), write(5), read(5)}));
  EXPECT_FALSE(hazards.add(job(2), std::vector<Claim>{read(5)}));
  EXPECT_EQ(hazards.remove(job(1)), std::vector{job(2)});
  EXPECT_TRUE(hazards.remove(job(2)).empty());
  EXPECT_EQ(hazards.places(), 0U);
}

// Random jobs that start when allowed and end in random order: no two that conflict run at once,
// conflicting ones run in submission order, and all of them run.
TEST(HazardTrackerTest, RandomJobsNeverConflictAndAllRun) {
  std::mt19937 random(7);
  for (int round = 0; round < 30; ++round) {
    HazardTracker hazards;
    std::map<std::uint64_t, std::vector<Claim>> claims;
    std::map<std::uint32_t, std::vector<std::uint64_t>>
        started_on;  // Place -> jobs in start order.
    std::vector<std::uint64_t> running;
    std::uint64_t next = 1;
    std::size_t ended = 0;
    constexpr std::uint64_t kJobs = 300;
    const auto conflict = [&](std::uint64_t a, std::uint64_t b) {
      for (const Claim& x : claims.at(a)) {
        for (const Claim& y : claims.at(b)) {
          if (x.place == y.place && (x.access == Access::kWrite || y.access == Access::kWrite)) {
            return true;
          }
        }
      }
      return false;
    };
    const auto start = [&](std::uint64_t id) {
      for (const std::uint64_t other : running) {
        ASSERT_FALSE(conflict(id, other)) << id << " runs beside " << other;
      }
      running.push_back(id);
      for (const Claim& claim : claims.at(id)) {
        started_on[claim.place.index].push_back(id);
      }
    };
    while (ended < kJobs) {
      if (next <= kJobs && (running.empty() || random() % 2 == 0)) {
        const std::uint64_t id = next++;
        for (std::uint32_t i = 0, n = static_cast<std::uint32_t>(1 + random() % 6); i < n; ++i) {
          const auto index = static_cast<std::uint32_t>(random() % 12);
          claims[id].push_back(random() % 3 == 0 ? write(index) : read(index));
        }
        if (hazards.add(job(id), claims[id])) {
          start(id);
        }
      } else {
        ASSERT_FALSE(running.empty()) << "nothing runs, but " << ended << " of all jobs ended";
        const std::size_t at = random() % running.size();
        const std::uint64_t id = running[at];
        running.erase(running.begin() + static_cast<std::ptrdiff_t>(at));
        ++ended;
        for (const ipc::JobId freed : hazards.remove(job(id))) {
          start(freed.value);
        }
      }
      if (HasFatalFailure()) {
        return;
      }
    }
    EXPECT_EQ(hazards.jobs(), 0U);
    EXPECT_EQ(hazards.places(), 0U);
    for (const auto& [index, order] : started_on) {
      for (std::size_t i = 0; i < order.size(); ++i) {
        for (std::size_t j = i + 1; j < order.size(); ++j) {
          if (order[i] > order[j]) {
            EXPECT_FALSE(conflict(order[i], order[j])) << order[i] << " overtook " << order[j];
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvferry::cache_manager
