// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/block_runs.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::Digest;

constexpr std::size_t kNone = ~std::size_t{0};

/// Blocks, each of which continues an earlier one or none, that come and go in any order.
class BlockRunsTest : public testing::Test {
 protected:
  struct Block {
    RunNode node;
    std::size_t above = kNone;
    bool is_told = true;  ///< Which one it continues, when it comes.
    bool visible = false;
  };

  void make(std::size_t count, std::uint64_t seed) {
    random_.seed(seed);
    blocks_.clear();
    for (std::size_t i = 0; i < count; ++i) {
      Block& block = blocks_.emplace_back();
      // Mostly long chains, some of which part.
      const bool begins = i == 0 || random_() % 40 == 0;
      if (!begins) block.above = random_() % 8 == 0 ? random_() % i : i - 1;
    }
  }
  static Digest digest(std::size_t i) { return Digest::hash(&i, sizeof(i)); }
  ipc::BlockKey key(std::size_t i) const { return {root_, digest(i), ipc::GroupId{0}}; }

  void add(std::size_t i) {
    Block& block = blocks_[i];
    block.node = RunNode{};
    block.node.key = key(i);
    if (block.above != kNone) block.node.before = digest(block.above);
    const bool is_there = block.above != kNone && blocks_[block.above].visible;
    runs_.add(block.node, is_there ? &blocks_[block.above].node : nullptr);
    block.visible = true;
  }
  void remove(std::size_t i) {
    runs_.remove(blocks_[i].node);
    blocks_[i].visible = false;
  }
  std::uint32_t expected(std::size_t i) const {
    std::uint32_t run = 0;
    for (; i != kNone && blocks_[i].visible; i = blocks_[i].above) ++run;
    return run;
  }
  void check(const std::string& when) {
    const auto view = ipc::PrefixTableView::map(table_.fd(), table_.size_bytes());
    ASSERT_TRUE(view.has_value());
    std::size_t visible = 0;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const auto found = view->find(key(i));
      ASSERT_EQ(found.has_value(), blocks_[i].visible) << when << ", block " << i;
      if (!found) continue;
      ++visible;
      ASSERT_EQ(found->run, expected(i)) << when << ", block " << i;
      ASSERT_EQ(blocks_[i].node.run, expected(i)) << when << ", block " << i;
    }
    ASSERT_EQ(table_.stats().entries, visible) << when;
  }

  const Digest root_ = Digest::from_words(1, 1);
  std::mt19937_64 random_;
  std::deque<Block> blocks_;  // nodes stay where they are
  ipc::PrefixTable table_{100'000};
  std::uint64_t joined_ = 0;
  BlockRuns runs_{table_, [this](RunNode& below, RunNode& above) {
                    EXPECT_EQ(below.above, &above);
                    ++joined_;
                  }};
};

TEST_F(BlockRunsTest, EveryRandomHistoryHasTheRunsThatAreThere) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    make(300, seed);
    for (int step = 0; step < 1'500; ++step) {
      const std::size_t i = random_() % blocks_.size();
      if (blocks_[i].visible) {
        remove(i);
      } else {
        add(i);
      }
      if (step % 50 == 0) check("seed " + std::to_string(seed) + " step " + std::to_string(step));
    }
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      if (blocks_[i].visible) remove(i);
    }
    check("after all");
  }
}

TEST_F(BlockRunsTest, WhatIsHeldBackIsInTheTableOnceItIsTold) {
  make(2'000, 4);
  std::vector<std::size_t> order(blocks_.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_);
  for (std::size_t next = 0; next < order.size();) {
    runs_.begin();
    runs_.hold_back();
    for (std::size_t i = 0; i < 300 && next < order.size(); ++i) add(order[next++]);
    runs_.tell();
    check("of the first " + std::to_string(next));
  }
  for (std::size_t i = 0; i < 500; ++i) remove(order[i]);
  check("and without some");
}

TEST_F(BlockRunsTest, StoredInAnyOrderAPrefixIsOneRun) {
  make(1, 1);
  constexpr std::size_t kLength = 2'000;
  for (std::size_t i = 1; i < kLength; ++i) blocks_.emplace_back().above = i - 1;
  std::vector<std::size_t> order(kLength);
  for (std::size_t i = 0; i < kLength; ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_);
  for (const std::size_t i : order) add(i);
  check("all there");
  EXPECT_EQ(blocks_.back().node.run, kLength);
  EXPECT_GT(joined_, 0U);
}

TEST_F(BlockRunsTest, WhatLeavesTogetherIsLeftAlone) {
  make(5'000, 3);
  for (std::size_t i = 0; i < blocks_.size(); ++i) add(i);
  // From the first on, which is the worst order.
  for (Block& block : blocks_) block.node.leaves = true;
  const std::uint32_t last = blocks_.back().node.run;
  remove(0);
  EXPECT_EQ(blocks_.back().node.run, last) << "it goes anyway";
  for (std::size_t i = 1; i < blocks_.size(); ++i) remove(i);
  check("all gone");
}

TEST_F(BlockRunsTest, OfManyThatContinueOneBlockEachLeavesAndComesBack) {
  constexpr std::size_t kMany = 20'000;
  make(1, 1);
  for (std::size_t i = 1; i <= kMany; ++i) blocks_.emplace_back().above = 0;
  for (std::size_t i = 0; i <= kMany; ++i) add(i);
  remove(0);
  check("all of them wait");
  for (std::size_t i = 1; i <= kMany; i += 2) remove(i);
  add(0);
  for (std::size_t i = 1; i <= kMany; i += 2) add(i);
  check("all of them are back");
}

TEST_F(BlockRunsTest, BlocksThatWaitForAHashOfZeroLeaveNothingBehind) {
  blocks_.resize(2);
  add(0);
  add(1);
  blocks_[0].node.key.block = {};  // whatever its name is
  runs_.link(blocks_[1].node, blocks_[0].node);
  runs_.remove(blocks_[0].node);
  runs_.remove(blocks_[1].node);
  RunNode zero;
  zero.key = {root_, {}, ipc::GroupId{0}};
  runs_.add(zero, nullptr);
  EXPECT_EQ(zero.below, nullptr);
  runs_.remove(zero);
}

TEST_F(BlockRunsTest, HowMuchIsLookedAtForCirclesIsBounded) {
  BlockRuns runs(
      table_, [](RunNode&, RunNode&) {}, 100);
  blocks_.resize(202);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].node.key = key(i);
    const bool continues = i > 0 && i <= 200;
    if (continues) blocks_[i].node.before = digest(i - 1);
    runs.add(blocks_[i].node, continues ? &blocks_[i - 1].node : nullptr);
  }
  EXPECT_EQ(blocks_[200].node.run, 201U) << "there is nothing to be looked for in that order";
  RunNode& apart = blocks_[201].node;
  runs.begin();
  runs.link(apart, blocks_[200].node);
  EXPECT_EQ(apart.run, 1U) << "too far from its beginning";
  runs.link(apart, blocks_[10].node);
  EXPECT_EQ(apart.run, 1U) << "nothing is left for this request";
  runs.begin();
  runs.link(apart, blocks_[10].node);
  EXPECT_EQ(apart.run, 12U);
}

TEST_F(BlockRunsTest, WhatAMistakenEngineSaysMakesNoCircle) {
  blocks_.resize(3);
  for (std::size_t i = 0; i < 3; ++i) blocks_[i].above = (i + 1) % 3;
  for (std::size_t i = 0; i < 3; ++i) add(i);
  // 0 continues 1, 2 continues 0, and that 1 continues 2 is not believed.
  EXPECT_EQ(blocks_[0].node.run, 2U);
  EXPECT_EQ(blocks_[1].node.run, 1U);
  EXPECT_EQ(blocks_[2].node.run, 3U);
  runs_.link(blocks_[0].node, blocks_[2].node);
  runs_.link(blocks_[1].node, blocks_[1].node);
  for (std::size_t i = 0; i < 3; ++i) remove(i);
  EXPECT_EQ(table_.stats().entries, 0U);
}

TEST_F(BlockRunsTest, WhatIsLearntLaterJoinsRuns) {
  blocks_.resize(3);
  for (std::size_t i = 0; i < 3; ++i) add(i);
  runs_.link(blocks_[2].node, blocks_[1].node);
  EXPECT_EQ(blocks_[2].node.run, 2U);
  runs_.link(blocks_[1].node, blocks_[0].node);
  EXPECT_EQ(blocks_[2].node.run, 3U);
  runs_.link(blocks_[2].node, blocks_[0].node);
  EXPECT_EQ(blocks_[2].node.run, 3U) << "it continues one already";
  EXPECT_EQ(joined_, 2U);
}

}  // namespace
}  // namespace kvferry::cache_manager
