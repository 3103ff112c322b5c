// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Priorities of blocks, which every policy obeys.
#include "kvferry/cache_manager/eviction_policy.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using testing::ElementsAre;

constexpr std::uint8_t kOrdinary = ipc::Retention::kOrdinary;

bool all_may(EntryId /*id*/) { return true; }

std::vector<BlockUse> path_of(const std::vector<EntryId>& ids) {
  std::vector<BlockUse> path;
  for (const EntryId id : ids) path.push_back({id, 1000 + id});
  return path;
}

class PriorityTest : public testing::TestWithParam<std::string_view> {
 protected:
  void use(const std::vector<EntryId>& ids) { policy_->use(path_of(ids)); }
  std::vector<EntryId> evict_all() {
    std::vector<EntryId> gone;
    while (const auto evicted = policy_->evict(all_may)) gone.push_back(*evicted);
    return gone;
  }

  std::unique_ptr<EvictionPolicy> policy_ = make_eviction_policy(GetParam(), 64).value();
};

TEST_P(PriorityTest, LowerOnesGoFirst) {
  for (const EntryId id : {0U, 1U, 2U, 3U, 4U}) use({id});
  policy_->set_priority(0, 90);
  policy_->set_priority(1, 60);
  policy_->set_priority(3, 20);
  policy_->set_priority(4, 0);
  EXPECT_THAT(evict_all(), ElementsAre(4U, 3U, 2U, 1U, 0U));
}

TEST_P(PriorityTest, OfOnePriorityWhatWasUsedLongestAgoGoesFirst) {
  for (const EntryId id : {0U, 1U, 2U}) {
    use({id});
    policy_->set_priority(id, 80);
  }
  use({0});
  EXPECT_THAT(evict_all(), ElementsAre(1U, 2U, 0U));
}

TEST_P(PriorityTest, WhatABlockContinuesStaysWithIt) {
  use({0, 1, 2});
  use({3});
  policy_->set_priority(2, 80);
  EXPECT_THAT(evict_all(), ElementsAre(3U, 2U, 1U, 0U));
}

TEST_P(PriorityTest, ALowBlockStaysForAsLongAsOthersContinueIt) {
  use({0, 1});
  use({2});
  policy_->set_priority(0, 0);
  policy_->set_priority(2, 80);
  EXPECT_THAT(evict_all(), ElementsAre(1U, 0U, 2U));
}

TEST_P(PriorityTest, AnOrdinaryOneAgainIsThePolicys) {
  for (const EntryId id : {0U, 1U}) use({id});
  policy_->set_priority(0, 80);
  policy_->set_priority(0, kOrdinary);
  policy_->set_priority(1, 80);
  EXPECT_THAT(evict_all(), ElementsAre(0U, 1U));
}

TEST_P(PriorityTest, APlaceThatIsAnothersHasNoPriority) {
  use({0});
  policy_->set_priority(0, 80);
  policy_->erase(0);
  policy_->use(std::vector<BlockUse>{{0, 77}});
  use({1});
  policy_->set_priority(1, 40);
  EXPECT_THAT(evict_all(), ElementsAre(0U, 1U));
}

TEST_P(PriorityTest, WhatIsHeldOrMayNotGoIsPassedByWhateverItsPriority) {
  for (const EntryId id : {0U, 1U, 2U}) {
    use({id});
    policy_->set_priority(id, static_cast<std::uint8_t>(10 * id));
  }
  policy_->hold(0);
  EXPECT_EQ(policy_->evict([](EntryId id) { return id != 1; }), 2U);
  policy_->let_go(0);
  EXPECT_THAT(evict_all(), ElementsAre(0U, 1U));
}

/// A fixed forest whose blocks come and go: what is known of it here, beside the policy.
class Forest {
 public:
  static constexpr EntryId kBlocks = 200;

  explicit Forest(std::mt19937& random) : parent_(kBlocks, kNoEntry) {
    for (EntryId id = 8; id < kBlocks; ++id) parent_[id] = static_cast<EntryId>(random() % id);
  }
  std::vector<EntryId> enter(EntryId last) {
    std::vector<EntryId> path;
    for (EntryId id = last; id != kNoEntry; id = parent_[id]) path.insert(path.begin(), id);
    for (const EntryId id : path) priorities_.emplace(id, kOrdinary);
    return path;
  }
  void set(EntryId id, std::uint8_t priority) { priorities_.at(id) = priority; }
  /// Of all blocks that could go: the lowest priority.
  std::optional<std::uint8_t> lowest(const std::set<EntryId>& held) const {
    std::optional<std::uint8_t> found;
    for (const auto& [id, priority] : priorities_) {
      if (held.contains(id) || is_continued(id)) continue;
      found = std::min(found.value_or(priority), priority);
    }
    return found;
  }
  /// @return its priority; nothing: it was not there, or something continues it
  std::optional<std::uint8_t> evict(EntryId id) {
    const auto known = priorities_.find(id);
    if (known == priorities_.end() || is_continued(id)) return std::nullopt;
    const std::uint8_t priority = known->second;
    priorities_.erase(known);
    return priority;
  }
  [[nodiscard]] std::size_t size() const { return priorities_.size(); }
  [[nodiscard]] EntryId any(std::mt19937& random) const {
    return std::next(priorities_.begin(), static_cast<int>(random() % priorities_.size()))->first;
  }

 private:
  [[nodiscard]] bool is_continued(EntryId id) const {
    return std::any_of(priorities_.begin(), priorities_.end(),
                       [&](const auto& other) { return parent_[other.first] == id; });
  }

  std::vector<EntryId> parent_;
  std::map<EntryId, std::uint8_t> priorities_;
};

// Whatever comes: what goes is the end of a prefix, and nothing lower could have gone.
TEST_P(PriorityTest, NothingGoesBeforeWhatIsLower) {
  constexpr std::size_t kRoom = 50;
  std::mt19937 random(5);
  Forest forest(random);
  std::set<EntryId> held;
  for (int round = 0; round < 2'500; ++round) {
    policy_->use(path_of(forest.enter(static_cast<EntryId>(random() % Forest::kBlocks))));
    for (int i = 0; i < 3; ++i) {
      const EntryId id = forest.any(random);
      const auto priority = static_cast<std::uint8_t>(random() % 5 * 20 + 15);  // one is ordinary
      policy_->set_priority(id, priority);
      forest.set(id, priority);
    }
    if (const EntryId id = forest.any(random); random() % 3 == 0 && held.insert(id).second) {
      policy_->hold(id);
    }
    while (held.size() > 10) {
      policy_->let_go(*held.begin());
      held.erase(held.begin());
    }
    while (policy_->size() > kRoom) {
      const auto lowest = forest.lowest(held);
      const auto evicted = policy_->evict(all_may);
      ASSERT_EQ(evicted.has_value(), lowest.has_value()) << "round " << round;
      if (!evicted) break;
      ASSERT_FALSE(held.contains(*evicted));
      ASSERT_EQ(forest.evict(*evicted), lowest) << "round " << round << ", block " << *evicted;
    }
    ASSERT_EQ(policy_->size(), forest.size());
  }
}

INSTANTIATE_TEST_SUITE_P(Policies,
                         PriorityTest,
                         testing::ValuesIn(eviction_policies().begin(), eviction_policies().end()),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace kvferry::cache_manager
