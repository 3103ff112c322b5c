// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "split_map.hpp"

#include "kvferry/cache_manager/paged_vector.hpp"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>

namespace kvferry::cache_manager {
namespace {

TEST(SplitMapTest, HoldsWhatAMapHoldsWhateverIsDone) {
  std::mt19937_64 random(7);
  SplitMap<std::uint64_t, std::unique_ptr<int>> split;
  std::map<std::uint64_t, int> reference;
  for (int step = 0; step < 20'000; ++step) {
    const std::uint64_t key = random() % 3000;
    switch (random() % 3) {
      case 0:
        if (!reference.contains(key)) {
          split[key] = std::make_unique<int>(step);
          reference[key] = step;
        } else {
          EXPECT_EQ(*split[key], reference[key]);
        }
        break;
      case 1: EXPECT_EQ(split.erase(key), reference.erase(key) > 0); break;
      default: {
        const auto* found = split.find(key);
        ASSERT_EQ(found != nullptr, reference.contains(key));
        if (found != nullptr) {
          EXPECT_EQ(**found, reference[key]);
        }
      }
    }
    ASSERT_EQ(split.size(), reference.size());
    ASSERT_EQ(split.empty(), reference.empty());
  }
  std::map<std::uint64_t, int> visited;
  split.visit([&](std::uint64_t key, const std::unique_ptr<int>& value) {
    EXPECT_TRUE(visited.emplace(key, *value).second) << key;
  });
  EXPECT_EQ(visited, reference);
}

TEST(SplitMapTest, EntriesStayWhereTheyAreWhileOthersCome) {
  SplitMap<int, int> split;
  const int* first = &(split[0] = 1);
  for (int i = 1; i < 100'000; ++i) split[i] = i;
  EXPECT_EQ(split.find(0), first);
  EXPECT_EQ(*first, 1);
}

TEST(PagedVectorTest, GrowsWithoutMovingAnything) {
  PagedVector<int> paged;
  paged.grow(3);
  EXPECT_EQ(paged.size(), 3U);
  EXPECT_EQ(paged[2], 0);
  int* const first = &paged[0];
  for (int i = 3; i < 100'000; ++i) paged.add(i);
  paged.grow(10);
  ASSERT_EQ(paged.size(), 100'000U);
  EXPECT_EQ(first, &paged[0]);
  for (int i = 3; i < 100'000; ++i) ASSERT_EQ(paged[static_cast<std::size_t>(i)], i);
}

}  // namespace
}  // namespace kvferry::cache_manager
