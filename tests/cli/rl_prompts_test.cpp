// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/prompts.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace kvferry::cli {
namespace {

constexpr std::uint32_t kPerIteration = 16;
constexpr std::uint32_t kBlock = 16;

bool begin_alike(const ipc::Generate& a, const ipc::Generate& b) {
  return a.prompt.size() > kBlock && b.prompt.size() > kBlock &&
         std::equal(a.prompt.begin(), a.prompt.begin() + kBlock, b.prompt.begin());
}

TEST(PromptSetTest, RepeatsExactlyFromItsSeed) {
  const PromptSet one(7, kPerIteration, kBlock);
  const PromptSet same(7, kPerIteration, kBlock);
  const PromptSet other(8, kPerIteration, kBlock);
  ASSERT_EQ(one.all().size(), 2 * kPerIteration);
  bool differs = false;
  for (std::size_t i = 0; i < one.all().size(); ++i) {
    EXPECT_EQ(one.all()[i].prompt, same.all()[i].prompt);
    EXPECT_EQ(one.all()[i].max_tokens, same.all()[i].max_tokens);
    differs = differs || one.all()[i].prompt != other.all()[i].prompt;
  }
  EXPECT_TRUE(differs);
  EXPECT_EQ(one.of_iteration(3), same.of_iteration(3));
}

TEST(PromptSetTest, PromptsAreDistinctVaryInLengthAndSeveralBeginAlike) {
  const PromptSet set(0, kPerIteration, kBlock);
  std::set<std::vector<std::uint32_t>> distinct;
  std::set<std::size_t> lengths;
  std::size_t pairs = 0;
  for (std::size_t i = 0; i < set.all().size(); ++i) {
    distinct.insert(set.all()[i].prompt);
    lengths.insert(set.all()[i].prompt.size());
    EXPECT_GT(set.all()[i].max_tokens, 0U);
    for (std::size_t j = 0; j < i; ++j) {
      pairs += begin_alike(set.all()[i], set.all()[j]) ? 1U : 0U;
    }
  }
  EXPECT_EQ(distinct.size(), set.all().size());
  EXPECT_GT(lengths.size(), set.all().size() / 3);
  EXPECT_GE(pairs, set.all().size());
}

TEST(PromptSetTest, HalfOfTheAnswersAreStillWrittenWhenTheOthersAreDone) {
  const PromptSet set(0, kPerIteration, kBlock);
  const auto is_long = [](const ipc::Generate& request) { return request.max_tokens >= 64; };
  const auto is_short = [](const ipc::Generate& request) { return request.max_tokens < 8; };
  EXPECT_EQ(std::count_if(set.all().begin(), set.all().end(), is_long), kPerIteration);
  EXPECT_EQ(std::count_if(set.all().begin(), set.all().end(), is_short), kPerIteration);
}

TEST(PromptSetTest, AnIterationDrawsPromptsOnceEachAndAnotherOneOthers) {
  const PromptSet set(0, kPerIteration, kBlock);
  std::set<std::size_t> seen;
  for (std::uint32_t iteration = 1; iteration <= 12; ++iteration) {
    const auto drawn = set.of_iteration(iteration);
    const std::set<std::size_t> distinct(drawn.begin(), drawn.end());
    EXPECT_EQ(distinct.size(), kPerIteration);
    EXPECT_LT(*distinct.rbegin(), set.all().size());
    seen.insert(distinct.begin(), distinct.end());
  }
  EXPECT_EQ(seen.size(), set.all().size()) << "every prompt comes back";
  EXPECT_NE(set.of_iteration(1), set.of_iteration(2));
}

TEST(PromptSetTest, CountsTheBlocksThatItNeeds) {
  const PromptSet set(0, 1, kBlock);
  std::uint64_t total = 0;
  std::uint64_t longest = 0;
  for (const ipc::Generate& request : set.all()) {
    const std::uint64_t blocks = (request.prompt.size() + request.max_tokens + kBlock - 1) / kBlock;
    total += blocks;
    longest = std::max(longest, blocks);
  }
  EXPECT_EQ(set.total_blocks(), total);
  EXPECT_EQ(set.longest_blocks(), longest);
}

}  // namespace
}  // namespace kvferry::cli
