// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/storing_keys.hpp"

#include <gtest/gtest.h>

namespace kvferry::worker {
namespace {

using std::chrono_literals::operator""ms;

Digest key(std::uint64_t i) { return Digest::from_words(7, i); }

TEST(StoringKeysTest, KeyIsThereFromItsBeginToItsEnd) {
  const ipc::TimePoint now{};
  StoringKeys keys(2);
  keys.begin(GroupId{1}, key(1));
  EXPECT_TRUE(keys.has(GroupId{1}, key(1), now));
  EXPECT_FALSE(keys.has(GroupId{0}, key(1), now)) << "of another group";
  EXPECT_FALSE(keys.has(GroupId{1}, key(2), now));
  keys.end(GroupId{1}, key(1), StoreEnd::kFailed, now);
  EXPECT_FALSE(keys.has(GroupId{1}, key(1), now));
}

TEST(StoringKeysTest, WhatWasInUseIsNotAskedForAgainForAWhile) {
  const ipc::TimePoint now{};
  StoringKeys keys(1);
  keys.begin(GroupId{0}, key(1));
  keys.end(GroupId{0}, key(1), StoreEnd::kInUse, now);
  EXPECT_TRUE(keys.has(GroupId{0}, key(1), now + StoringKeys::kInUsePause - 1ms));
  EXPECT_FALSE(keys.has(GroupId{0}, key(1), now + StoringKeys::kInUsePause));
  // Begun anew, it stays however long it takes.
  keys.end(GroupId{0}, key(1), StoreEnd::kInUse, now);
  keys.begin(GroupId{0}, key(1));
  EXPECT_TRUE(keys.has(GroupId{0}, key(1), now + 2 * StoringKeys::kInUsePause));
}

TEST(StoringKeysTest, ManyThatWereInUseAreForgottenWithoutBeingAskedFor) {
  const ipc::TimePoint now{};
  StoringKeys keys(1);
  keys.begin(GroupId{0}, key(0));
  for (std::uint64_t i = 1; i < 5000; ++i) {
    keys.end(GroupId{0}, key(i), StoreEnd::kInUse, now + i * StoringKeys::kInUsePause);
  }
  EXPECT_TRUE(keys.has(GroupId{0}, key(0), now)) << "it is under way";
  EXPECT_FALSE(keys.has(GroupId{0}, key(1), now)) << "swept, though its time is not over by this";
}

}  // namespace
}  // namespace kvferry::worker
