// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Who goes next over a shared link. Time is whatever the test says: a job ends when it is told to.
#include "manager/link_shares.hpp"

#include "kvferry/ipc/model/urgency.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

constexpr std::uint64_t kLimit = LinkShares::kBytesUnderWay;

struct Sent {
  std::uint32_t engine = 0;
  std::uint64_t bytes = 0;
  std::uint8_t priority = 0;
};

class LinkSharesTest : public ::testing::Test {
 protected:
  void open(std::uint32_t engine, std::uint32_t weight, const std::string& link = "one") {
    shares_.set(engine, ipc::Rank{0}, {.link = link, .weight = weight});
  }
  [[nodiscard]] LinkShares::Lane lane(std::uint32_t engine = 1, bool to_host = false) const {
    return shares_.lane_of(engine, to_host);
  }
  /// One after the other of what waits, as long as there is room; sizes by engine.
  void send(std::map<std::uint32_t, std::deque<std::uint64_t>>& waiting) {
    for (;;) {
      std::vector<LinkShares::Offer> offers;
      for (const auto& [engine, sizes] : waiting) {
        if (!sizes.empty()) offers.push_back({engine, 0});
      }
      const auto choice = shares_.next(lane(), offers, now_);
      if (!choice) return;
      auto& sizes = waiting.at(choice->engine);
      sent_.push_back({choice->engine, sizes.front(), 0});
      sizes.pop_front();
      shares_.sent(lane(), choice->engine, sent_.back().bytes, 0, now_);
    }
  }
  void end(std::size_t index) {
    const Sent over = sent_.at(index);
    sent_.erase(sent_.begin() + static_cast<std::ptrdiff_t>(index));
    shares_.ended(lane(), over.engine, over.bytes, over.priority, now_);
    moved_[over.engine] += over.bytes;
  }
  /// It is the first engine's turn, which has more under way than its share; the second has
  /// nothing.
  void leave_behind(const LinkShares::Lane& lane) {
    shares_.sent(lane, 1, 2 * kLimit, 1, now_);
    shares_.sent(lane, 1, 2 * kLimit, 1, now_);
    shares_.sent(lane, 2, 10 * kLimit, 1, now_);
    shares_.ended(lane, 2, 10 * kLimit, 1, now_);
  }
  [[nodiscard]] std::uint64_t under_way() const {
    std::uint64_t bytes = 0;
    for (const Sent& one : sent_) bytes += one.bytes;
    return bytes;
  }

  LinkShares shares_;
  ipc::TimePoint now_{std::chrono::hours(1)};
  std::vector<Sent> sent_;
  std::map<std::uint32_t, std::uint64_t> moved_;
};

TEST_F(LinkSharesTest, BytesGoByWeightWhateverSizesJobsHaveAndInWhateverOrderTheyEnd) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 60; ++round) {
    shares_ = LinkShares();
    sent_.clear();
    moved_.clear();
    const auto engines = static_cast<std::uint32_t>(2 + random() % 4);
    std::map<std::uint32_t, std::deque<std::uint64_t>> waiting;
    std::map<std::uint32_t, double> weights;
    double all = 0;
    std::uint64_t largest = 0;
    for (std::uint32_t engine = 1; engine <= engines; ++engine) {
      weights[engine] = static_cast<double>(1 + random() % 9);
      all += weights[engine];
      open(engine, static_cast<std::uint32_t>(weights[engine]));
      // Jobs of each are of about one size, which differs much between them.
      const std::uint64_t size = (1ULL << 20) << random() % 8;
      largest = std::max(largest, 2 * size);
      for (int i = 0; i < 6000; ++i) waiting[engine].push_back(1 + size / 2 + random() % size);
    }
    std::uint64_t total = 0;
    bool all_wait = true;
    while (all_wait && total < 400 * largest) {
      send(waiting);
      ASSERT_FALSE(sent_.empty()) << "a link stands still although there are jobs";
      const std::size_t next = random() % sent_.size();
      total += sent_[next].bytes;
      end(next);
      for (const auto& [engine, sizes] : waiting) all_wait = all_wait && !sizes.empty();
    }
    for (std::uint32_t engine = 1; engine <= engines; ++engine) {
      std::uint64_t unfinished = 0;
      for (const Sent& one : sent_) unfinished += one.engine == engine ? one.bytes : 0;
      const double due = static_cast<double>(total + under_way()) * weights[engine] / all;
      const auto got = static_cast<double>(moved_[engine] + unfinished);
      // Each is ahead of none by more than a job and what it may have under way.
      EXPECT_NEAR(got, due, 2.0 * static_cast<double>(largest + kLimit))
          << "engine " << engine << " of weight " << weights[engine] << " of " << all;
    }
  }
}

TEST_F(LinkSharesTest, WhoIsAloneSendsAllThatItHas) {
  open(1, 1);
  open(2, 5, "another");
  std::map<std::uint32_t, std::deque<std::uint64_t>> waiting;
  waiting[1].assign(64, kLimit);
  shares_.sent(lane(2), 2, 10 * kLimit, 0, now_);
  send(waiting);
  EXPECT_EQ(sent_.size(), 64U);
}

TEST_F(LinkSharesTest, BetweenSeveralWhatIsUnderWayIsBoundedAndNeverLessThanTwoJobs) {
  open(1, 1);
  open(2, 1);
  std::map<std::uint32_t, std::deque<std::uint64_t>> waiting;
  waiting[1].assign(100, kLimit / 8);
  waiting[2].assign(100, kLimit / 8);
  send(waiting);
  EXPECT_EQ(under_way(), kLimit);
  while (!sent_.empty()) end(0);
  waiting[1].assign(10, 5 * kLimit);
  waiting[2].assign(10, 5 * kLimit);
  send(waiting);
  ASSERT_EQ(sent_.size(), 2U);
  EXPECT_NE(sent_[0].engine, sent_[1].engine);
}

// All that the first one sent while it was alone is still under way.
TEST_F(LinkSharesTest, WhoComesLaterBeginsAtOnceAndWithoutWhatOthersHadBefore) {
  open(1, 1);
  open(2, 1);
  std::map<std::uint32_t, std::deque<std::uint64_t>> waiting;
  waiting[1].assign(64, kLimit / 4);
  send(waiting);
  ASSERT_EQ(sent_.size(), 64U);
  waiting[1].assign(200, kLimit / 4);
  waiting[2].assign(200, kLimit / 4);
  send(waiting);
  EXPECT_EQ(std::count_if(sent_.begin(), sent_.end(), [](const Sent& s) { return s.engine == 2; }),
            2)
      << "its half of what may be under way";
  while (std::any_of(sent_.begin(), sent_.end(), [](const Sent& s) { return s.engine == 1; }) &&
         under_way() > kLimit) {
    end(0);
    send(waiting);
  }
  moved_.clear();
  for (int i = 0; i < 80; ++i) {
    end(0);
    send(waiting);
  }
  EXPECT_NEAR(static_cast<double>(moved_[2]), static_cast<double>(moved_[1]),
              2.0 * static_cast<double>(kLimit));
}

TEST_F(LinkSharesTest, WhatIsMoreUrgentThanAllOfItsEngineDoesNotWaitForRoom) {
  open(1, 1);
  open(2, 1);
  const auto lane = this->lane();
  shares_.sent(lane, 1, 4 * kLimit, 1, now_);
  shares_.sent(lane, 2, 4 * kLimit, 1, now_);
  std::vector<LinkShares::Offer> offers{{1, 1}, {2, 1}};
  EXPECT_FALSE(shares_.next(lane, offers, now_).has_value());
  offers[1].priority = 3;
  const auto choice = shares_.next(lane, offers, now_);
  ASSERT_TRUE(choice.has_value());
  EXPECT_EQ(choice->engine, 2U);
  EXPECT_TRUE(choice->urgent);
  shares_.sent(lane, 2, 1 << 20, 3, now_);
  EXPECT_FALSE(shares_.next(lane, offers, now_).has_value())
      << "one of a priority, not all of them";
}

// Its mover stands still, or is told to copy slowly: it is far behind, and cannot take its turn.
TEST_F(LinkSharesTest, WhoseTurnItIsAndDoesNotMoveHoldsUpOthersForAWhileOnly) {
  open(1, 1);
  open(2, 1);
  const auto lane = this->lane();
  leave_behind(lane);
  const std::vector<LinkShares::Offer> offers{{1, 1}, {2, 1}};
  EXPECT_FALSE(shares_.next(lane, offers, now_).has_value()) << "it is the first one's turn";
  const auto look = shares_.next_look(lane);
  ASSERT_TRUE(look.has_value());
  EXPECT_GT(*look, now_);
  EXPECT_LE(*look, now_ + std::chrono::milliseconds(400));
  now_ = *look;
  for (int i = 0; i < 100; ++i) {
    const auto choice = shares_.next(lane, offers, now_);
    ASSERT_TRUE(choice.has_value());
    ASSERT_EQ(choice->engine, 2U);
    shares_.sent(lane, 2, kLimit, 1, now_);
    EXPECT_FALSE(shares_.next(lane, offers, now_).has_value()) << "its half is under way";
    shares_.ended(lane, 2, kLimit, 1, now_);
  }
  // It moves, and takes its turn.
  shares_.ended(lane, 1, 2 * kLimit, 1, now_);
  const auto choice = shares_.next(lane, offers, now_);
  ASSERT_TRUE(choice.has_value());
  EXPECT_EQ(choice->engine, 1U);
}

// Whoever waits until then would look all the time.
TEST_F(LinkSharesTest, NoLookIsDueOnceNothingWaitsAnyMore) {
  open(1, 1);
  open(2, 1);
  const auto lane = this->lane();
  leave_behind(lane);
  const std::vector<LinkShares::Offer> offers{{1, 1}, {2, 1}};
  EXPECT_FALSE(shares_.next(lane, offers, now_).has_value());
  ASSERT_TRUE(shares_.next_look(lane).has_value());
  EXPECT_FALSE(shares_.next(lane, {}, now_).has_value());
  EXPECT_FALSE(shares_.next_look(lane).has_value());
}

TEST_F(LinkSharesTest, NobodyWaitsForWhoIsToldToCopySlowly) {
  shares_.set(1, ipc::Rank{0}, {.link = "one", .paced_loads = true});
  open(2, 1);
  for (const bool to_host : {false, true}) {
    const auto lane = this->lane(1, to_host);
    leave_behind(lane);
    const std::vector<LinkShares::Offer> offers{{1, 1}, {2, 1}};
    const auto choice = shares_.next(lane, offers, now_);
    ASSERT_EQ(choice.has_value(), !to_host);
    if (choice) {
      EXPECT_EQ(choice->engine, 2U);
    }
  }
}

TEST_F(LinkSharesTest, OrdinaryLoadIsNotUrgentForWhatItsEngineFetchesAhead) {
  open(1, 1);
  open(2, 1);
  const auto lane = this->lane();
  leave_behind(lane);
  shares_.sent(lane, 2, kLimit, ipc::Urgency::kAhead, now_);
  const std::vector<LinkShares::Offer> offers{{1, 1}, {2, ipc::Urgency::kOrdinary}};
  const auto choice = shares_.next(lane, offers, now_);
  EXPECT_FALSE(choice && choice->urgent);
}

TEST_F(LinkSharesTest, EnginesShareWhatAnyOfTheirRanksHaveInCommon) {
  open(1, 1, "one");
  open(2, 1, "two");
  open(3, 1, "three");
  EXPECT_NE(lane(1), lane(2));
  shares_.set(1, ipc::Rank{1}, {.link = "two"});
  EXPECT_EQ(lane(1), lane(2)) << "a job of the first goes over both links";
  EXPECT_NE(lane(1), lane(3));
  shares_.set(2, ipc::Rank{1}, {.link = "three"});
  EXPECT_EQ(lane(1), lane(3)) << "by way of the second";
  EXPECT_NE(lane(1, false), lane(1, true));
  shares_.forget(2);
  EXPECT_NE(lane(1), lane(3)) << "nothing is shared any more";
  shares_.set(1, ipc::Rank{1}, {.link = "one"});
  open(4, 1, "two");
  EXPECT_NE(lane(1), lane(4)) << "the rank's link is another one now";
}

TEST_F(LinkSharesTest, WhatGoesOnSharedKeepsItsPlace) {
  open(1, 1, "one");
  open(2, 1, "one");
  const auto shared = lane(1);
  open(3, 1, "two");
  shares_.set(2, ipc::Rank{1}, {.link = "two"});
  EXPECT_EQ(lane(1), shared);
  EXPECT_EQ(lane(3), shared);
  shares_.forget(3);
  EXPECT_EQ(lane(1), shared);
  EXPECT_EQ(lane(2), shared);
}

TEST_F(LinkSharesTest, LinkOfARankThatHasLeftIsItsEnginesNoMore) {
  open(1, 1, "one");
  shares_.set(1, ipc::Rank{1}, {.link = "two"});
  open(2, 1, "one");
  open(3, 1, "two");
  ASSERT_EQ(lane(2), lane(3)) << "by way of the first";
  const auto shared = lane(2);
  shares_.leave(1, ipc::Rank{1});
  EXPECT_EQ(lane(1), shared) << "what is still shared keeps its place";
  EXPECT_EQ(lane(2), shared);
  EXPECT_NE(lane(3), shared) << "nobody else copies over its link";
  shares_.leave(1, ipc::Rank{1});
  shares_.leave(4, ipc::Rank{0});
  EXPECT_EQ(lane(2), shared) << "who is not there changes nothing";
  shares_.set(1, ipc::Rank{1}, {.link = "two"});
  EXPECT_EQ(lane(2), lane(3)) << "its successor's";
}

// As it comes back after all of them have ended.
TEST_F(LinkSharesTest, EngineOfFewerRanksThanBeforeSharesOnlyWhatThoseCopyOver) {
  for (std::uint32_t rank = 0; rank < 4; ++rank) {
    shares_.set(1, ipc::Rank{rank}, {.link = "link " + std::to_string(rank)});
  }
  open(2, 1, "link 0");
  open(3, 1, "link 3");
  for (std::uint32_t rank = 0; rank < 4; ++rank) shares_.leave(1, ipc::Rank{rank});
  EXPECT_NE(lane(1), lane(2));
  EXPECT_NE(lane(1), lane(3));
  EXPECT_NE(lane(2), lane(3));
  open(1, 1, "link 0");
  EXPECT_EQ(lane(1), lane(2));
  EXPECT_NE(lane(1), lane(3)) << "a rank that it has no more does not bind it";
}

// Its movers have died, and it may take long until that is proven to the last of their jobs.
TEST_F(LinkSharesTest, JobsOfAnEngineWhoseRanksHaveLeftEndWhereTheyWereSentAndHoldUpNobody) {
  open(1, 3);
  open(2, 1);
  const auto before = lane(1);
  shares_.sent(before, 1, 4 * kLimit, 1, now_);
  shares_.sent(before, 2, kLimit / 4, 1, now_);
  const std::vector<LinkShares::Offer> offers{{2, 1}};
  ASSERT_FALSE(shares_.next(before, offers, now_).has_value()) << "its quarter is under way";
  shares_.leave(1, ipc::Rank{0});
  ASSERT_EQ(lane(2), before);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(shares_.next(before, offers, now_).has_value()) << "it is alone";
    shares_.sent(before, 2, kLimit, 1, now_);
  }
  shares_.ended(before, 1, 4 * kLimit, 1, now_);
  shares_.forget(1);
  open(1, 3);
  EXPECT_EQ(lane(1), before);
  const std::vector<LinkShares::Offer> both{{1, 1}, {2, 1}};
  const auto choice = shares_.next(before, both, now_);
  ASSERT_TRUE(choice.has_value());
  EXPECT_EQ(choice->engine, 1U) << "it is back, and its turn";
}

TEST_F(LinkSharesTest, UrgentJobOfAnEngineWithNothingUnderWayWaitsForNobodysTurn) {
  open(1, 1);
  open(2, 1);
  const auto lane = this->lane();
  leave_behind(lane);
  std::vector<LinkShares::Offer> offers{{1, 1}, {2, ipc::Urgency::kOrdinary}};
  EXPECT_FALSE(shares_.next(lane, offers, now_).has_value());
  offers[1].priority = ipc::Urgency::kOrdinary + 1;
  const auto choice = shares_.next(lane, offers, now_);
  ASSERT_TRUE(choice.has_value());
  EXPECT_EQ(choice->engine, 2U);
  EXPECT_TRUE(choice->urgent);
}

TEST_F(LinkSharesTest, DirectionsAndLinksDoNotTouchEachOther) {
  open(1, 1);
  open(2, 1);
  open(3, 1, "another");
  EXPECT_EQ(lane(1), lane(2));
  EXPECT_NE(lane(1), lane(3));
  shares_.sent(lane(1, true), 1, 9 * kLimit, 0, now_);
  shares_.sent(lane(1, true), 2, 9 * kLimit, 0, now_);
  shares_.sent(lane(3), 3, 9 * kLimit, 0, now_);
  shares_.sent(lane(3), 3, 9 * kLimit, 0, now_);
  const std::vector<LinkShares::Offer> offers{{1, 0}, {2, 0}};
  EXPECT_TRUE(shares_.next(lane(1), offers, now_).has_value());
  EXPECT_FALSE(shares_.next(lane(1, true), offers, now_).has_value());
}

TEST_F(LinkSharesTest, LinksOfEnginesThatAreGoneAreForgotten) {
  for (std::uint32_t i = 1; i <= 1000; ++i) open(7, 1, "link " + std::to_string(i));
  open(8, 1, "link 1000");
  EXPECT_EQ(lane(7), lane(8));
  shares_.forget(7);
  shares_.forget(8);
  EXPECT_EQ(lane(7), lane(9)) << "as those that never named one";
}

}  // namespace
}  // namespace kvferry::cache_manager
