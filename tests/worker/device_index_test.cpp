// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/device_index.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

namespace kvferry::worker {
namespace {

using ipc::BlockId;
using ipc::Digest;
using State = GroupIndex::State;

Digest hash_of(std::uint64_t value) { return Digest::from_words(1, value); }

/// Allocates a block, fills it and lets it go: it is kept as the most recent one.
BlockId keep(GroupIndex& index, std::uint64_t value) {
  const auto block = index.allocate();
  EXPECT_TRUE(block.has_value());
  EXPECT_TRUE(index.announce(*block, hash_of(value)));
  index.make_valid(*block);
  index.release(*block);
  return *block;
}

TEST(GroupIndexTest, EvictsTheLeastRecentlyReleasedBlock) {
  GroupIndex index(3);
  keep(index, 1);
  keep(index, 2);
  keep(index, 3);
  const auto first = index.find(hash_of(1));
  ASSERT_TRUE(first);
  index.acquire(first->block);  // A use makes it the most recent one.
  index.release(first->block);
  keep(index, 4);
  EXPECT_TRUE(index.find(hash_of(1)));
  EXPECT_FALSE(index.find(hash_of(2)));
  EXPECT_TRUE(index.find(hash_of(3)));
}

TEST(GroupIndexTest, WhatIsUsedWhileItIsWrittenBackIsNotTheOldest) {
  GroupIndex index(3);
  const BlockId used = keep(index, 1);
  const BlockId unused = keep(index, 2);
  keep(index, 3);
  for (const BlockId block : {used, unused}) index.acquire(block);  // For their stores.
  index.acquire(used);                                              // A request finds it ...
  index.release(used);                                              // ... and ends sooner.
  for (const BlockId block : {used, unused}) index.release_as_oldest(block);
  EXPECT_EQ(index.next_victims(3).back().value, used.value);
  EXPECT_EQ(index.next_victims(1).front().value, unused.value);
  // That use does not count for the next store.
  index.acquire(used);
  index.release_as_oldest(used);
  EXPECT_EQ(index.next_victims(1).front().value, used.value);
}

TEST(GroupIndexTest, NeverEvictsABlockInUse) {
  GroupIndex index(2);
  const BlockId used = keep(index, 1);
  index.acquire(used);
  keep(index, 2);
  ASSERT_TRUE(index.allocate());
  EXPECT_EQ(index.available(), 0U);
  EXPECT_FALSE(index.allocate());
  EXPECT_TRUE(index.find(hash_of(1)));
}

TEST(GroupIndexTest, ABlockIsPendingUntilItsContentsAreComplete) {
  GroupIndex index(1);
  const BlockId block = *index.allocate();
  ASSERT_TRUE(index.announce(block, hash_of(1)));
  ASSERT_TRUE(index.find(hash_of(1)));
  EXPECT_EQ(index.find(hash_of(1))->state, State::kPending);
  index.make_valid(block);
  EXPECT_EQ(index.find(hash_of(1))->state, State::kValid);
}

TEST(GroupIndexTest, APendingBlockThatIsGivenUpIsForgotten) {
  GroupIndex index(1);
  const BlockId block = *index.allocate();
  ASSERT_TRUE(index.announce(block, hash_of(1)));
  index.release(block);
  EXPECT_FALSE(index.find(hash_of(1)));
  EXPECT_EQ(index.available(), 1U);
}

TEST(GroupIndexTest, ASecondBlockOfTheSameHashStaysPrivate) {
  GroupIndex index(2);
  const BlockId first = *index.allocate();
  const BlockId second = *index.allocate();
  ASSERT_TRUE(index.announce(first, hash_of(1)));
  EXPECT_FALSE(index.announce(second, hash_of(1)));
  index.release(second);
  EXPECT_TRUE(index.find(hash_of(1)));
}

TEST(GroupIndexTest, AForgottenBlockInUseIsNotHandedOutAgainUntilReleased) {
  GroupIndex index(1);
  const BlockId block = keep(index, 1);
  index.acquire(block);
  index.forget_all();
  EXPECT_FALSE(index.find(hash_of(1)));
  EXPECT_FALSE(index.allocate());
  index.make_valid(block);  // A late completion must not bring it back.
  index.release(block);
  EXPECT_FALSE(index.find(hash_of(1)));
  EXPECT_TRUE(index.allocate());
}

/// Random operations against a model that keeps everything in plain lists.
TEST(GroupIndexTest, AgreesWithAPlainModelOverRandomOperations) {
  struct Model {
    std::map<std::uint64_t, std::uint32_t> valid;  // hash -> block
    std::vector<std::uint64_t> kept;               // hashes, oldest first
    std::map<std::uint32_t, std::uint32_t> used;   // block -> references
    std::map<std::uint32_t, std::uint64_t> names;  // block -> hash, indexed ones only
  };
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t n) {
      return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
    };
    const std::uint32_t blocks = 1 + static_cast<std::uint32_t>(below(24));
    GroupIndex index(blocks);
    Model model;
    for (int step = 0; step < 2'000; ++step) {
      const std::uint64_t name = below(40);
      switch (below(4)) {
        case 0: {  // Allocate and complete under a name.
          const auto block = index.allocate();
          ASSERT_EQ(block.has_value(), model.used.size() < blocks);
          if (!block) break;
          ASSERT_EQ(model.used.count(block->value), 0U) << "handed out while in use";
          if (model.names.count(block->value) != 0) {
            ASSERT_EQ(model.names[block->value], model.kept.front()) << "not the oldest";
            model.valid.erase(model.kept.front());
            model.kept.erase(model.kept.begin());
            model.names.erase(block->value);
          } else {
            ASSERT_LT(model.used.size() + model.kept.size(), blocks);
          }
          model.used[block->value] = 1;
          const bool fresh = model.valid.count(name) == 0;
          ASSERT_EQ(index.announce(*block, hash_of(name)), fresh);
          if (fresh) {
            index.make_valid(*block);
            model.valid[name] = block->value;
            model.names[block->value] = name;
          }
          break;
        }
        case 1: {  // Use what is there.
          const auto found = index.find(hash_of(name));
          ASSERT_EQ(found.has_value(), model.valid.count(name) != 0);
          if (!found) break;
          ASSERT_EQ(found->block.value, model.valid[name]);
          index.acquire(found->block);
          ++model.used[found->block.value];
          std::erase(model.kept, name);
          break;
        }
        case 2: {  // Let one go.
          if (model.used.empty()) break;
          const auto chosen =
              std::next(model.used.begin(), static_cast<std::ptrdiff_t>(below(model.used.size())));
          const std::uint32_t block = chosen->first;
          index.release(BlockId{block});
          if (--chosen->second > 0) break;
          model.used.erase(chosen);
          if (model.names.count(block) != 0) model.kept.push_back(model.names[block]);
          break;
        }
        default: {  // Now and then everything is forgotten.
          if (below(50) != 0) break;
          index.forget_all();
          model.valid.clear();
          model.kept.clear();
          model.names.clear();
          break;
        }
      }
      ASSERT_EQ(index.available(), blocks - model.used.size());
    }
  }
}

TEST(GroupIndexTest, PartsOfAStoredUnitAreNotedWhereItEnds) {
  GroupIndex index(2);
  const auto first = index.allocate().value();
  const auto last = index.allocate().value();
  const auto end = ipc::Digest::from_words(1, 2);
  index.mark_stored(end, 0b10);
  EXPECT_FALSE(index.is_stored(last)) << "it holds nothing yet";
  ASSERT_TRUE(index.announce(first, ipc::Digest::from_words(1, 1)));
  ASSERT_TRUE(index.announce(last, end));
  EXPECT_EQ(index.stored_parts(end), 0U);
  index.mark_stored(end, 0b10);
  EXPECT_FALSE(index.is_stored(first));
  EXPECT_TRUE(index.is_stored(last));
  EXPECT_EQ(index.stored_parts(end), 0b10U);
  index.mark_stored(end, 0b01);
  EXPECT_EQ(index.stored_parts(end), 0b11U);
  index.forget_stored(end);
  EXPECT_FALSE(index.is_stored(last)) << "a load did not find it";
  index.mark_stored(last);
  EXPECT_EQ(index.stored_parts(end), 1U) << "a unit of one block";
  index.forget(last);
  EXPECT_EQ(index.stored_parts(end), 0U);
}

}  // namespace
}  // namespace kvferry::worker
