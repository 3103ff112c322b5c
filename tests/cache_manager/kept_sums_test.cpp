// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/kept_sums.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace kvferry::cache_manager {
namespace {

std::vector<ipc::KeptSum> sums_of(std::uint64_t job, std::size_t count = 1) {
  std::vector<ipc::KeptSum> sums;
  for (std::size_t i = 0; i < count; ++i) {
    sums.push_back({ipc::JobId{job}, (job * count + i) * 4096, job + 1});
  }
  return sums;
}

TEST(KeptSumsTest, NothingIsToldToWhoDoesNotAsk) {
  KeptSums kept;
  kept.add(sums_of(1));
  EXPECT_FALSE(kept.next().has_value());
}

TEST(KeptSumsTest, WhatWasKeptIsToldAndWhatIsStillComputedFollows) {
  KeptSums kept;
  kept.add(sums_of(1));
  kept.tell(/*queued=*/3);
  auto message = kept.next();
  ASSERT_TRUE(message.has_value());
  EXPECT_EQ(message->sums.size(), 1U);
  EXPECT_FALSE(message->is_last);
  EXPECT_FALSE(kept.next().has_value());
  kept.add(sums_of(2));
  EXPECT_EQ(kept.next()->sums.at(0).job.value, 2U);
  kept.add({});  // its pool is gone
  message = kept.next();
  ASSERT_TRUE(message.has_value());
  EXPECT_TRUE(message->sums.empty());
  EXPECT_TRUE(message->is_last);
  kept.add(sums_of(4));
  EXPECT_FALSE(kept.next().has_value()) << "of the new manager's own";
}

TEST(KeptSumsTest, WhoHasNothingSaysSo) {
  KeptSums kept;
  kept.tell(0);
  EXPECT_TRUE(kept.next()->is_last);
  EXPECT_FALSE(kept.next().has_value());
}

TEST(KeptSumsTest, ManyGoInSeveralMessagesAndTheOldestAreForgotten) {
  KeptSums kept;
  for (std::size_t job = 0; job <= KeptSums::kMost / 256; ++job) kept.add(sums_of(job, 256));
  kept.tell(0);
  std::size_t told = 0;
  for (;;) {
    const auto message = kept.next();
    ASSERT_TRUE(message.has_value());
    if (told == 0) {
      EXPECT_EQ(message->sums.at(0).job.value, 1U);
    }
    EXPECT_LE(message->sums.size(), KeptSums::kMostInMessage);
    told += message->sums.size();
    if (message->is_last) break;
  }
  EXPECT_EQ(told, KeptSums::kMost);
}

TEST(KeptSumsTest, OfAPlaceThatIsWrittenAgainAndAgainTheLastOneIsKept) {
  constexpr std::size_t kPlaces = 100;
  KeptSums kept;
  std::size_t most = 0;
  for (std::uint64_t job = 0; job < 100 * KeptSums::kFew; ++job) {
    kept.add({{ipc::JobId{job}, job % kPlaces * 4096, job + 1}});
    most = std::max(most, kept.size());
  }
  EXPECT_LE(most, KeptSums::kFew);
  kept.tell(0);
  std::map<std::uint64_t, std::uint64_t> jobs;  // by place
  const auto message = kept.next();
  ASSERT_TRUE(message.has_value());
  for (const ipc::KeptSum& sum : message->sums) jobs[sum.offset] = sum.job.value;
  ASSERT_EQ(jobs.size(), kPlaces);
  for (const auto& [place, job] : jobs) EXPECT_GE(job, 100 * KeptSums::kFew - kPlaces) << place;
}

TEST(KeptSumsTest, WhoAsksIsToldAllThatComesMeanwhile) {
  KeptSums kept;
  kept.add(sums_of(0));
  kept.tell(/*queued=*/4 * KeptSums::kFew);
  std::size_t told = kept.next()->sums.size();
  for (std::uint64_t job = 1; job < 4 * KeptSums::kFew; ++job) {
    kept.add({{ipc::JobId{job}, job % 10 * 4096, job}});
    const auto message = kept.next();
    ASSERT_TRUE(message.has_value());
    ASSERT_EQ(message->sums.size(), 1U);
    ASSERT_EQ(message->sums.at(0).job.value, job);
    ++told;
    ASSERT_EQ(message->is_last, told == 4 * KeptSums::kFew);
  }
  kept.add(sums_of(0));
  EXPECT_LE(kept.size(), 11U);
}

TEST(KeptSumsTest, WhatWasOfAPoolThatIsGoneIsNotTold) {
  KeptSums kept;
  kept.add(sums_of(1));
  kept.forget();
  kept.tell(0);
  EXPECT_TRUE(kept.next()->sums.empty());
}

}  // namespace
}  // namespace kvferry::cache_manager
