// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What every policy keeps, whatever is asked of it, and what ours is for.
#include "kvferry/cache_manager/eviction_policy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::ErrorCode;
using testing::ElementsAre;
using testing::HasSubstr;

bool any(EntryId /*id*/) { return true; }

std::unique_ptr<EvictionPolicy> make(std::string_view name, std::size_t capacity) {
  auto policy = make_eviction_policy(name, capacity);
  EXPECT_TRUE(policy.has_value());
  return std::move(policy).value();
}

std::vector<BlockUse> uses(const std::vector<EntryId>& ids) {
  std::vector<BlockUse> path;
  for (const EntryId id : ids) path.push_back({id, 1000 + id});
  return path;
}

/// A request: everything of it is used, then what is too much goes. @return blocks found
std::size_t request(EvictionPolicy& policy, std::size_t capacity, const std::vector<EntryId>& ids) {
  std::size_t found = 0;
  while (found < ids.size() && policy.has(ids[found])) ++found;
  policy.use(uses(ids));
  while (policy.size() > capacity) EXPECT_TRUE(policy.evict(any).has_value());
  return found;
}

class AnyPolicyTest : public testing::TestWithParam<std::string_view> {};

TEST_P(AnyPolicyTest, NothingIsThereAndNothingCanGoOfAnEmptyCache) {
  const auto policy = make(GetParam(), 4);
  EXPECT_EQ(policy->size(), 0U);
  EXPECT_FALSE(policy->has(0));
  EXPECT_FALSE(policy->evict(any).has_value());
  policy->use({});
  EXPECT_EQ(policy->size(), 0U);
}

TEST_P(AnyPolicyTest, APrefixGoesFromItsEnd) {
  const auto policy = make(GetParam(), 4);
  policy->use(uses({0, 1, 2}));
  policy->use(uses({3}), /*above=*/2);
  std::vector<EntryId> gone;
  while (const auto evicted = policy->evict(any)) gone.push_back(*evicted);
  EXPECT_THAT(gone, ElementsAre(3U, 2U, 1U, 0U));
  EXPECT_EQ(policy->size(), 0U);
}

TEST_P(AnyPolicyTest, WhatIsHeldStaysAndSoDoesAllBeforeIt) {
  const auto policy = make(GetParam(), 8);
  policy->use(uses({0, 1, 2}));
  policy->use(uses({0, 1, 3}));
  policy->hold(1);
  policy->hold(1);
  std::set<EntryId> gone;
  while (const auto evicted = policy->evict(any)) gone.insert(*evicted);
  EXPECT_THAT(gone, ElementsAre(2U, 3U));
  policy->let_go(1);
  EXPECT_FALSE(policy->evict(any).has_value()) << "it was held twice";
  policy->let_go(1);
  EXPECT_EQ(policy->evict(any), 1U);
  EXPECT_EQ(policy->evict(any), 0U);
}

TEST_P(AnyPolicyTest, WhatCouldGoIsVisitedAsFarAsLooksReach) {
  const auto policy = make(GetParam(), 8);
  policy->use(uses({0, 1, 2}));
  policy->use(uses({3, 4}));
  policy->hold(4);
  const auto visited = [&policy](std::size_t looks) {
    std::vector<EntryId> ids;
    policy->visit_evictable(
        any,
        [&ids](EntryId id) {
          ids.push_back(id);
          return true;
        },
        looks);
    return std::pair(ids, looks);
  };
  const auto [all, left] = visited(100);
  EXPECT_THAT(all, ElementsAre(2U, 1U, 0U));
  EXPECT_GT(left, 0U);
  const auto [some, none] = visited(100 - left - 3);
  EXPECT_LT(some.size(), 3U);
  EXPECT_EQ(none, 0U);
  EXPECT_EQ(policy->size(), 5U);
}

TEST_P(AnyPolicyTest, WhatMayNotGoNowIsPassedBy) {
  const auto policy = make(GetParam(), 4);
  for (const EntryId id : {0U, 1U, 2U}) policy->use(uses({id}));
  EXPECT_FALSE(policy->evict([](EntryId) { return false; }).has_value());
  EXPECT_EQ(policy->size(), 3U);
  EXPECT_EQ(policy->evict([](EntryId id) { return id == 1; }), 1U);
  EXPECT_FALSE(policy->has(1));
}

TEST_P(AnyPolicyTest, WhatContinuedAnErasedBlockStaysAndItsPlaceCanBeAnothers) {
  const auto policy = make(GetParam(), 4);
  policy->use(uses({0, 1}));
  policy->erase(0);
  EXPECT_TRUE(policy->has(1));
  policy->use(std::vector<BlockUse>{{0, 77}});  // another block, which nothing continues
  EXPECT_EQ(policy->evict([](EntryId id) { return id == 0; }), 0U);
  EXPECT_EQ(policy->evict(any), 1U);
  EXPECT_EQ(policy->size(), 0U);
}

TEST_P(AnyPolicyTest, ABlockMayComeTwiceInARequest) {
  const auto policy = make(GetParam(), 4);
  policy->use(uses({0, 1, 0, 1}));
  policy->use(uses({0, 1, 0, 1}));
  EXPECT_EQ(policy->size(), 2U);
  EXPECT_EQ(policy->evict(any), 1U);
  EXPECT_EQ(policy->evict(any), 0U);
}

TEST_P(AnyPolicyTest, RequestsThatTurnAPrefixRoundMakeNoCircle) {
  const auto policy = make(GetParam(), 4);
  policy->use(uses({0, 1, 2}));
  policy->use(uses({2, 1, 0}));
  policy->use(uses({1, 0}), /*above=*/2);
  policy->use(uses({3}), /*above=*/3);
  std::set<EntryId> gone;
  while (const auto evicted = policy->evict(any)) gone.insert(*evicted);
  EXPECT_THAT(gone, ElementsAre(0U, 1U, 2U, 3U));
}

// Of a million tokens; walking up for each block would take minutes.
TEST_P(AnyPolicyTest, ALongPrefixEntersAndIsTurnedRoundInTime) {
  constexpr EntryId kBlocks = 65'536;
  const auto policy = make(GetParam(), kBlocks);
  std::vector<EntryId> path(kBlocks);
  std::iota(path.begin(), path.end(), 0U);
  policy->use(uses(path));
  std::reverse(path.begin(), path.end());
  policy->use(uses(path));
  for (EntryId id = 0; id < 100; ++id) policy->use(uses({kBlocks - 1, 0, kBlocks - 1, 0}));
  EXPECT_EQ(policy->evict(any), kBlocks - 1);
}

TEST_P(AnyPolicyTest, LearnsWhatABlockContinues) {
  const auto policy = make(GetParam(), 4);
  policy->use(uses({1}));  // before the block that it continues is there
  policy->use(uses({0}));
  policy->use(uses({0, 1}));
  EXPECT_EQ(policy->evict(any), 1U);
  EXPECT_EQ(policy->evict(any), 0U);
}

// Random trees of prefixes, holds, erasures and evictions, against what is known of them here.
TEST_P(AnyPolicyTest, NoPrefixEverGetsAGap) {
  constexpr std::size_t kCapacity = 60;
  constexpr EntryId kBlocks = 400;
  std::mt19937 random(7);
  // Block n continues parent[n]: a fixed forest, whose blocks come and go.
  std::vector<EntryId> parent(kBlocks, kNoEntry);
  for (EntryId id = 10; id < kBlocks; ++id) {
    parent[id] = static_cast<EntryId>(random() % id);
  }
  const auto policy = make(GetParam(), kCapacity);
  std::set<EntryId> cached;
  std::set<EntryId> apart;  // Something before them was erased: they continue nothing.
  std::map<EntryId, int> held;
  const auto is_continued = [&](EntryId id) {
    return std::any_of(cached.begin(), cached.end(), [&](EntryId other) {
      return parent[other] == id && !apart.contains(other);
    });
  };
  for (int round = 0; round < 4'000; ++round) {
    std::vector<EntryId> path;
    for (EntryId id = static_cast<EntryId>(random() % kBlocks); id != kNoEntry; id = parent[id]) {
      path.insert(path.begin(), id);
    }
    for (const EntryId id : path) {
      if (cached.insert(id).second) apart.erase(id);
    }
    policy->use(uses(path));
    if (random() % 4 == 0) {
      policy->hold(path.back());
      ++held[path.back()];
    }
    if (!held.empty() && random() % 3 == 0) {
      const EntryId id = std::next(held.begin(), static_cast<int>(random() % held.size()))->first;
      policy->let_go(id);
      if (--held[id] == 0) held.erase(id);
    }
    if (random() % 50 == 0) {
      const EntryId id = *std::next(cached.begin(), static_cast<int>(random() % cached.size()));
      policy->erase(id);
      cached.erase(id);
      held.erase(id);
      for (EntryId other = 0; other < kBlocks; ++other) {
        if (parent[other] == id && cached.contains(other)) apart.insert(other);
      }
    }
    while (policy->size() > kCapacity) {
      const auto evicted = policy->evict(any);
      const bool some_could = std::any_of(cached.begin(), cached.end(), [&](EntryId id) {
        return !held.contains(id) && !is_continued(id);
      });
      ASSERT_EQ(evicted.has_value(), some_could) << "round " << round;
      if (!evicted) break;
      ASSERT_TRUE(cached.erase(*evicted)) << *evicted;
      ASSERT_FALSE(held.contains(*evicted)) << *evicted;
      ASSERT_FALSE(is_continued(*evicted)) << *evicted;
      apart.erase(*evicted);
    }
    ASSERT_EQ(policy->size(), cached.size());
    for (const EntryId id : path) ASSERT_EQ(policy->has(id), cached.contains(id)) << id;
  }
}

INSTANTIATE_TEST_SUITE_P(Policies,
                         AnyPolicyTest,
                         testing::ValuesIn(eviction_policies().begin(), eviction_policies().end()),
                         [](const auto& param) { return std::string(param.param); });

TEST(EvictionPolicyTest, UnknownNamesAreToldWithTheKnownOnes) {
  const auto policy = make_eviction_policy("fifo", 10);
  ASSERT_FALSE(policy.has_value());
  EXPECT_EQ(policy.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(policy.error().message, HasSubstr("'fifo' is none of reuse|lru|arc"));
}

TEST(EvictionPolicyTest, LruTakesWhatWasUsedLongestAgo) {
  const auto policy = make("lru", 3);
  for (const EntryId id : {0U, 1U, 2U}) policy->use(uses({id}));
  policy->use(uses({0}));
  EXPECT_EQ(policy->evict(any), 1U);
  EXPECT_EQ(policy->evict(any), 2U);
  EXPECT_EQ(policy->evict(any), 0U);
}

TEST(EvictionPolicyTest, LfuTakesWhatWasUsedLeastAndForgetsOldFame) {
  const auto policy = make("lfu", 2);
  for (int i = 0; i < 3; ++i) policy->use(uses({0}));
  EntryId next = 1;
  int rounds = 0;
  for (; policy->has(0) && rounds < 20; ++rounds) {  // each newcomer is used twice
    request(*policy, 2, {next});
    request(*policy, 2, {next});
    ++next;
  }
  EXPECT_GT(rounds, 1);
  EXPECT_LT(rounds, 20);
}

/// Hits of a mix: prefixes that come back all the time among others that never do.
std::size_t hits_beside_a_scan(std::string_view name) {
  constexpr std::size_t kCapacity = 300;
  const auto policy = make(name, kCapacity);
  std::mt19937 random(3);
  std::size_t hits = 0;
  EntryId next = 1'000;
  for (int round = 0; round < 6'000; ++round) {
    if (random() % 2 == 0) {
      const auto first = static_cast<EntryId>(random() % 20 * 10);
      hits += request(*policy, kCapacity, {first, first + 1, first + 2, first + 3, first + 4});
    } else {
      std::vector<EntryId> once;
      for (int i = 0; i < 20; ++i) once.push_back(next++);
      request(*policy, kCapacity, once);
    }
  }
  return hits;
}

// 100 blocks of the 300 are used again after 400 others, on average.
TEST(ReusePolicyTest, LearnsWhatNeverComesBack) {
  const std::size_t ours = hits_beside_a_scan("reuse");
  EXPECT_GT(ours, 13'000U) << "of some 15,000";
  EXPECT_GT(ours, hits_beside_a_scan("lru") * 3 / 2);
}

// A loop that is larger than the cache: nothing is found by who keeps the newest.
TEST(ReusePolicyTest, KeepsAPartOfALoopThatDoesNotFit) {
  constexpr std::size_t kCapacity = 200;
  std::map<std::string_view, std::size_t> hits;
  for (const std::string_view name : {"lru", "reuse"}) {
    const auto policy = make(name, kCapacity);
    for (EntryId round = 0; round < 12'000; ++round) {
      hits[name] += request(*policy, kCapacity, {round % 300});
    }
  }
  EXPECT_EQ(hits["lru"], 0U);
  EXPECT_GT(hits["reuse"], 4'000U) << "200 of 300 could be";
}

// Where age says it all, there is nothing to learn, and nothing is lost.
TEST(ReusePolicyTest, IsNoWorseThanLruWhereRecencyIsAll) {
  constexpr std::size_t kCapacity = 500;
  std::map<std::string_view, std::size_t> hits;
  for (const std::string_view name : {"lru", "reuse"}) {
    const auto policy = make(name, kCapacity);
    std::mt19937 random(11);
    std::geometric_distribution<EntryId> back(0.003);
    EntryId newest = 0;
    std::vector<EntryId> history;
    for (int round = 0; round < 30'000; ++round) {
      const EntryId age = back(random);
      const EntryId id = age < history.size() ? history[history.size() - 1 - age] : newest++;
      history.push_back(id);
      hits[name] += request(*policy, kCapacity, {id});
    }
  }
  EXPECT_GT(hits["reuse"] * 100, hits["lru"] * 99);
}

TEST(ReusePolicyTest, RemembersNoMoreThanItsCapacityAllows) {
  constexpr std::size_t kCapacity = 50;
  const auto policy = make("reuse", kCapacity);
  for (EntryId round = 0; round < 50'000; ++round) {
    const EntryId place = round % 64;  // Places are used again; blocks are others each time.
    if (policy->has(place)) policy->erase(place);
    policy->use(std::vector<BlockUse>{{place, round}});
    while (policy->size() > kCapacity) ASSERT_TRUE(policy->evict(any).has_value());
  }
  EXPECT_EQ(policy->size(), kCapacity);
}

}  // namespace
}  // namespace kvferry::cache_manager
