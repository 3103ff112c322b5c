// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "split_map.hpp"

#include "kvferry/cache_manager/paged_vector.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <unordered_map>

namespace kvferry::cache_manager {
namespace {

/// Puts all keys into few places, of few parts: rows get long, meet each other and go round the
/// end.
struct Crowded {
  std::uint64_t key = 0;
  friend bool operator==(const Crowded&, const Crowded&) = default;
};
}  // namespace

template <> struct SplitMapKey<Crowded> {
  struct Hash {
    std::size_t operator()(const Crowded& key) const noexcept { return key.key % 5; }
  };
  using Equal = std::equal_to<Crowded>;
};

namespace {

Crowded key_of(std::uint64_t number, const Crowded* /*of*/) { return {number}; }
std::uint64_t key_of(std::uint64_t number, const std::uint64_t* /*of*/) { return number; }
ipc::BlockKey key_of(std::uint64_t number, const ipc::BlockKey* /*of*/) {
  return {ipc::Digest::from_words(1, number % 3), ipc::Digest::from_words(number / 7, 2),
          ipc::GroupId{static_cast<std::uint32_t>(number % 7)}};
}
template <typename Key> Key key(std::uint64_t number) {
  return key_of(number, static_cast<const Key*>(nullptr));
}

/// A map that grows to so many keys and shrinks to none again, some times over.
template <typename Key> void do_what_a_map_does(std::uint64_t keys, int rounds) {
  std::mt19937_64 random(7);
  SplitMap<Key, std::unique_ptr<int>> split;
  std::unordered_map<std::uint64_t, int> reference;
  int steps = 0;
  for (int round = 0; round < rounds; ++round) {
    if (round % 3 == 1) split.reserve(keys);
    for (const int more_erased : {0, 1}) {
      for (std::uint64_t step = 0; step < 4 * keys; ++step) {
        const std::uint64_t number = random() % keys;
        const Key at = key<Key>(number);
        const bool is_there = reference.contains(number);
        const auto* found = split.find(at);
        ASSERT_EQ(found != nullptr, is_there) << number;
        if (found != nullptr) {
          ASSERT_EQ(**found, reference[number]);
        }
        if (random() % 4 == 0 ? more_erased == 0 : more_erased == 1) {
          ASSERT_EQ(split.erase(at), reference.erase(number) > 0);
        } else if (is_there) {
          ASSERT_EQ(*split[at], reference[number]);
        } else {
          split[at] = std::make_unique<int>(++steps);
          reference[number] = steps;
        }
        ASSERT_EQ(split.size(), reference.size());
        ASSERT_EQ(split.empty(), reference.empty());
      }
      std::unordered_map<int, std::uint64_t> left;
      for (const auto& [number, value] : reference) left[value] = number;
      split.visit([&left](const Key& at, const std::unique_ptr<int>& value) {
        const auto expected = left.find(*value);
        ASSERT_NE(expected, left.end()) << "visited twice, or not there";
        EXPECT_EQ(at, key<Key>(expected->second));
        left.erase(expected);
      });
      EXPECT_TRUE(left.empty()) << left.size() << " not visited";
    }
  }
}

TEST(SplitMapTest, HoldsWhatAMapHoldsWhateverIsDone) {
  do_what_a_map_does<std::uint64_t>(3000, 3);
  do_what_a_map_does<ipc::BlockKey>(3000, 3);
}

TEST(SplitMapTest, HoldsWhatAMapHoldsWhereKeysMeetInFewPlaces) {
  do_what_a_map_does<Crowded>(300, 8);
}

TEST(SplitMapTest, WhatIsErasedIsDestroyed) {
  const auto value = std::make_shared<int>(1);
  SplitMap<int, std::shared_ptr<int>> split;
  for (int i = 0; i < 1000; ++i) split[i] = value;
  for (int i = 0; i < 1000; i += 2) EXPECT_TRUE(split.erase(i));
  EXPECT_EQ(value.use_count(), 1 + 500);
  EXPECT_FALSE(split.erase(0));
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
