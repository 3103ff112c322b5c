// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/pair_rounds.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace kvferry::cli {
namespace {

constexpr double kMostOfThem = 0.99;

/// So many rounds of 100 us, of which these last were longer.
Samples rounds(std::size_t count, std::vector<double> longer = {}) {
  Samples all;
  for (std::size_t i = longer.size(); i < count; ++i) all.add(100);
  for (const double round : longer) all.add(round);
  return all;
}

std::optional<Spread> p99_spread(const std::vector<PairRounds>& pairs) {
  return spread_of_ratio(pairs, &PairRounds::beside, &PairRounds::without, kMostOfThem);
}

TEST(SpreadOfRatioTest, PairsThatAreAlikeHaveNone) {
  const std::vector<PairRounds> pairs(8, {rounds(50), rounds(50, {120, 120}), {}});
  const auto spread = p99_spread(pairs);
  ASSERT_TRUE(spread.has_value());
  EXPECT_DOUBLE_EQ(spread->low, 1.2);
  EXPECT_DOUBLE_EQ(spread->high, 1.2);
}

TEST(SpreadOfRatioTest, ATailOfOnePairMayBeDrawnNeverOrOften) {
  std::vector<PairRounds> pairs(10, {rounds(100), rounds(100), {}});
  pairs[3].beside = rounds(100, std::vector<double>(20, 150.0));
  const auto spread = p99_spread(pairs);
  ASSERT_TRUE(spread.has_value());
  // Not drawn in (9/10)^10 of the draws, which is more than the part that is left out.
  EXPECT_DOUBLE_EQ(spread->low, 1.0);
  EXPECT_DOUBLE_EQ(spread->high, 1.5);
}

TEST(SpreadOfRatioTest, WhatAllPairsHaveIsCertainThoughTheyDiffer) {
  std::vector<PairRounds> pairs;
  for (int i = 0; i < 20; ++i) {
    pairs.push_back({rounds(100), rounds(100, std::vector<double>(10, 110.0 + i)), {}});
  }
  const auto spread = p99_spread(pairs);
  ASSERT_TRUE(spread.has_value());
  EXPECT_GE(spread->low, 1.2);
  EXPECT_LT(spread->low, spread->high);
  EXPECT_LE(spread->high, 1.29);
}

TEST(SpreadOfRatioTest, PairsWithMoreRoundsWeighMore) {
  // One of them has a hundred times the rounds, of which none is long.
  const std::vector<PairRounds> pairs = {{rounds(10'000), rounds(10'000), {}},
                                         {rounds(100), rounds(100, {150, 150, 150}), {}}};
  const auto spread = p99_spread(pairs);
  ASSERT_TRUE(spread.has_value());
  EXPECT_DOUBLE_EQ(spread->low, 1.0);
  EXPECT_DOUBLE_EQ(spread->high, 1.5) << "a quarter of the draws have the small one alone";
}

TEST(SpreadOfRatioTest, IsTheSameForTheSamePairs) {
  std::vector<PairRounds> pairs;
  for (int i = 0; i < 6; ++i) {
    pairs.push_back({rounds(40, {101.0 + i}), rounds(40, {130.0 - 3 * i}), {}});
  }
  const auto first = p99_spread(pairs);
  const auto second = p99_spread(pairs);
  ASSERT_TRUE(first.has_value() && second.has_value());
  EXPECT_EQ(first->low, second->low);
  EXPECT_EQ(first->high, second->high);
  EXPECT_LT(first->low, first->high);
}

TEST(SpreadOfRatioTest, OfOnePairNothingIsKnown) {
  EXPECT_FALSE(p99_spread({}).has_value());
  EXPECT_FALSE(p99_spread({{rounds(10), rounds(10), {}}}).has_value());
  EXPECT_FALSE(p99_spread({{rounds(10), rounds(10), {}}, {rounds(10), {}, {}}}).has_value())
      << "nor of another without rounds";
}

TEST(AddPairsTest, TellsMeansByPairAndTailsOfAll) {
  BenchFigure figure;
  add_pairs({{rounds(2), rounds(2, {120}), rounds(2, {110})}, {rounds(2), rounds(2), rounds(2)}},
            figure);
  EXPECT_EQ(figure.slowdown.values(), (std::vector<double>{1.1, 1.0}));
  EXPECT_DOUBLE_EQ(figure.slowdown_beyond_copy.most(), 110.0 / 105.0);
  ASSERT_TRUE(figure.round_us.has_value());
  EXPECT_EQ(figure.round_us->p99, 100);
  EXPECT_EQ(figure.round_us->p99_beside, 120);
  EXPECT_EQ(figure.round_us->p99_beside_copy, 110);
  ASSERT_TRUE(figure.p99_spread.has_value() && figure.p99_beyond_copy_spread.has_value());
  EXPECT_DOUBLE_EQ(figure.p99_spread->low, 1.0);
  EXPECT_DOUBLE_EQ(figure.p99_spread->high, 1.2);
  EXPECT_DOUBLE_EQ(figure.p99_beyond_copy_spread->high, 120.0 / 110.0);
}

TEST(AddPairsTest, PhasesWithoutAWholeRoundDoNotCount) {
  BenchFigure figure;
  add_pairs({{rounds(3), {}, {}}, {{}, rounds(3), rounds(3)}}, figure);
  EXPECT_TRUE(figure.slowdown.empty());
  EXPECT_FALSE(figure.round_us.has_value());
  add_pairs({{rounds(3), rounds(3, {200}), {}}, {rounds(3), {}, rounds(3)}}, figure);
  EXPECT_EQ(figure.slowdown.size(), 1U);
  EXPECT_TRUE(figure.slowdown_beyond_copy.empty());
  ASSERT_TRUE(figure.round_us.has_value());
  EXPECT_EQ(figure.round_us->p99_beside_copy, 0);
  EXPECT_FALSE(figure.p99_spread.has_value());
}

}  // namespace
}  // namespace kvferry::cli
