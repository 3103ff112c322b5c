// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/race.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>

namespace kvferry::cache_manager {
namespace {

constexpr std::size_t kCapacity = 1000;
constexpr std::size_t kBlocks = 20;  ///< Of a request.
constexpr std::size_t kLfu = 5;

using Hits = std::array<std::size_t, Race::kMost>;

/// Requests of which each policy finds so many blocks, until another one than this leads; the cache
/// finds what its leader does. Returns how many it took.
std::size_t requests_until_led_by_another(Race& race, const Hits& hits, std::size_t most) {
  const std::size_t led = race.leader();
  for (std::size_t i = 0; i < most; ++i) {
    race.add(hits, hits.at(race.leader()), kBlocks);
    if (race.leader() != led) return i + 1;
  }
  return most;
}

TEST(RaceTest, LruLeadsWhileNoneFindsMore) {
  Race race(kCapacity, Race::kMost);
  EXPECT_EQ(race.leader(), Race::kLru);
  EXPECT_EQ(requests_until_led_by_another(race, {9, 9, 9, 8, 7, 0}, 1000), 1000U);
  EXPECT_EQ(race.leader(), Race::kLru);
}

TEST(RaceTest, TheFirstOneIsBelievedInSooner) {
  const auto needed = [](std::size_t better) {
    std::mt19937_64 random(1);
    Race race(kCapacity, Race::kMost);
    for (std::size_t requests = 1;; ++requests) {
      Hits hits{5, 5, 5, 5, 5, 5};
      hits.at(better) = random() % 3 == 0 ? 4 : 6;
      race.add(hits, hits.at(race.leader()), kBlocks);
      if (race.leader() == better || requests == 1000) return requests;
    }
  };
  EXPECT_LT(needed(0), needed(kLfu));
  EXPECT_LT(needed(kLfu), 1000U);
}

TEST(RaceTest, OneThatFindsMoreLeadsBeforeMuchIsLost) {
  for (const std::size_t better : {std::size_t{0}, kLfu}) {
    Race race(kCapacity, Race::kMost);
    Hits hits{5, 5, 5, 5, 5, 5};
    hits.at(better) = 7;
    const std::size_t requests = requests_until_led_by_another(race, hits, 1000);
    EXPECT_EQ(race.leader(), better);
    EXPECT_LT(2 * requests, kCapacity / 10) << "blocks that were not found";
  }
}

TEST(RaceTest, WhoeverIsBestTheCacheMissesLittleOfWhatThatOneFinds) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    Race race(kCapacity, Race::kMost);
    std::array<std::size_t, Race::kMost> chance{};  // Of each block, of eight.
    for (std::size_t& one : chance) one = random() % 8;
    std::array<double, Race::kMost> sums{};
    double found = 0;
    constexpr std::size_t kRequests = 2000;
    for (std::size_t i = 0; i < kRequests; ++i) {
      Hits hits{};
      for (std::size_t one = 0; one < hits.size(); ++one) {
        for (std::size_t block = 0; block < kBlocks; ++block) {
          if (random() % 8 < chance.at(one)) ++hits.at(one);
        }
        sums.at(one) += static_cast<double>(hits.at(one));
      }
      found += static_cast<double>(hits.at(race.leader()));
      race.add(hits, hits.at(race.leader()), kBlocks);
    }
    const double best = *std::max_element(sums.begin(), sums.end());
    EXPECT_LT(best - found, 0.01 * kRequests * kBlocks) << "seed " << seed;
  }
}

TEST(RaceTest, WhatWasBetterLongAgoCountsLittle) {
  Race race(kCapacity, Race::kMost);
  Hits hits{7, 5, 5, 5, 5, 5};
  (void)requests_until_led_by_another(race, hits, 1000);
  ASSERT_EQ(race.leader(), 0U);
  hits = {5, 7, 5, 5, 5, 5};
  EXPECT_LT(requests_until_led_by_another(race, hits, 10'000), 2000U);
  EXPECT_EQ(race.leader(), Race::kLru);
}

/// Of all others together.
double said_by_others(const Race& race, std::size_t one) {
  const Race::Says says = race.says();
  return std::accumulate(says.begin(), says.end(), -says.at(one));
}

TEST(RaceTest, LruHasMoreToSayThanAllOthersWhileNoneFindsMore) {
  Race race(kCapacity, Race::kMost);
  EXPECT_GT(race.says()[Race::kLru], said_by_others(race, Race::kLru));
  for (int i = 0; i < 100; ++i) race.add(Hits{9, 9, 9, 9, 9, 9}, 9, kBlocks);
  EXPECT_GT(race.says()[Race::kLru], said_by_others(race, Race::kLru));
}

TEST(RaceTest, OneThatFindsMuchMoreHasMoreToSayThanAllOthers) {
  Race race(kCapacity, Race::kMost);
  for (int i = 0; i < 500; ++i) race.add(Hits{5, 5, 5, 12, 5, 5}, 5, kBlocks);
  EXPECT_GT(race.says()[3], said_by_others(race, 3));
}

TEST(RaceTest, ManyThatFindALittleLessThanTheBestCountForMoreThanIt) {
  std::mt19937_64 random(2);
  Race race(kCapacity, Race::kMost);
  for (int i = 0; i < 2000; ++i) {
    Hits hits{};
    for (std::size_t& one : hits) one = 10 + random() % 3;
    hits[Race::kLru] = 5;
    if (random() % 100 == 0) ++hits[kLfu];
    race.add(hits, hits.at(race.leader()), kBlocks);
  }
  const Race::Says says = race.says();
  EXPECT_GT(says[2] + says[3] + says[4], says[kLfu]);
  EXPECT_LT(says[Race::kLru], 0.01);
}

TEST(RaceTest, WhoIsNotThereHasNothingToSay) {
  Race race(kCapacity, 2);
  for (std::size_t one = 2; one < Race::kMost; ++one) EXPECT_EQ(race.says().at(one), 0);
}

TEST(RaceTest, OfTwoOnlyLruIsTheOther) {
  for (const std::size_t better : {std::size_t{0}, Race::kLru}) {
    Race race(std::size_t{1} << 20, 2);
    std::array<std::size_t, 2> hits{1, 1};
    hits.at(better) = 19;
    for (int i = 0; i < 5000; ++i) race.add(hits, hits.at(race.leader()), kBlocks);
    EXPECT_EQ(race.leader(), better);
  }
}

}  // namespace
}  // namespace kvferry::cache_manager
