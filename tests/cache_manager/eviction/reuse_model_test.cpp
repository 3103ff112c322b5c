// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/reuse_model.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using Cell = ReuseModel::Cell;
constexpr std::size_t kCapacity = 6'400;  // The first step of age ends at 100.
const std::vector<double> kNothingPending(ReuseModel::kCells, 0);

/// Blocks of the class, whose reuse has this rate in each step; what the model would be told.
template <typename Rate>
void live(ReuseModel& model, Cell first, int blocks, std::mt19937& random, const Rate& rate) {
  for (int block = 0; block < blocks; ++block) {
    for (Cell cell = first; !ReuseModel::is_last(cell); ++cell) {
      const auto width = static_cast<double>(model.end(cell) - model.begin(cell));
      std::exponential_distribution<double> until(rate(ReuseModel::bin_of(cell)));
      const double time = until(random);
      model.add_time(cell, std::min(time, width));
      if (time < width) {
        model.add_use(cell);
        model.end_request();
        break;
      }
    }
  }
}

TEST(ReuseModelTest, StepsCoverAllAgesAndClassesAreApart) {
  const ReuseModel model(kCapacity);
  std::set<Cell> firsts;
  for (const std::uint32_t uses : {1U, 2U, 3U, 5U, 9U, 17U, 33U, 1000U}) {
    for (const std::uint32_t turn : {1U, 2U, 3U, 5U, 1000U}) {
      const Cell first = ReuseModel::first_cell(uses, turn, false);
      firsts.insert(first);
      firsts.insert(ReuseModel::first_cell(uses, turn, true));
      EXPECT_EQ(ReuseModel::first_cell(uses, turn, true) == first, uses == 1);
      EXPECT_EQ(model.begin(first), 0U);
      for (Cell cell = first; !ReuseModel::is_last(cell); ++cell) {
        ASSERT_LT(model.begin(cell), model.end(cell));
        ASSERT_EQ(model.end(cell), model.begin(cell + 1));
      }
    }
  }
  EXPECT_EQ(firsts.size(), ReuseModel::kClasses);
  EXPECT_GT(ReuseModel(1).end(0), 0U);
}

TEST(ReuseModelTest, KnowsNothingAndTakesTheOldestFirst) {
  const ReuseModel model(kCapacity);
  EXPECT_EQ(model.by_worth().size(), ReuseModel::kCells);
  double last = 0;
  for (const Cell cell : model.by_worth()) {
    EXPECT_GE(model.worth(cell), last);
    last = model.worth(cell);
  }
  for (Cell cell = 0; cell + 2 < ReuseModel::kBins; ++cell) {
    EXPECT_GT(model.worth(cell), model.worth(cell + 1));
  }
}

TEST(ReuseModelTest, ConstantRatesAreWorthThemselves) {
  ReuseModel model(kCapacity);
  std::mt19937 random(1);
  const Cell rare = ReuseModel::first_cell(1, 1, false);
  const Cell often = ReuseModel::first_cell(9, 1, false);
  live(model, rare, 4'000, random, [](std::size_t) { return 1e-4; });
  live(model, often, 4'000, random, [](std::size_t) { return 2e-3; });
  model.learn(kNothingPending, 0);
  for (Cell bin = 0; bin < 10; ++bin) {
    EXPECT_NEAR(std::log(model.worth(rare + bin) / 1e-4), 0, 0.25) << bin;
    EXPECT_NEAR(std::log(model.worth(often + bin) / 2e-3), 0, 0.25) << bin;
  }
}

// Nobody comes back at once, everybody later: a young block is worth its future.
TEST(ReuseModelTest, ARiseThatIsSignificantIsBelieved) {
  ReuseModel model(kCapacity);
  std::mt19937 random(2);
  const Cell first = ReuseModel::first_cell(1, 1, false);
  live(model, first, 4'000, random, [](std::size_t bin) {
    return bin < 6 ? 1e-6 : bin < 10 ? 3e-3 : 1e-6;
  });
  model.learn(kNothingPending, 0);
  EXPECT_GT(model.worth(first + 7), 3 * model.worth(first));
  EXPECT_GT(model.worth(first + 7), 30 * model.worth(first + 14));
  EXPECT_GT(model.worth(first), 3 * model.worth(first + 14)) << "it is on its way there";
}

// A few requests of many blocks each look like hundreds of events, and are not.
TEST(ReuseModelTest, ARiseThatMayBeChanceIsNot) {
  ReuseModel model(kCapacity);
  const Cell first = ReuseModel::first_cell(1, 1, false);
  for (Cell bin = 0; bin < 8; ++bin) {
    const auto width = static_cast<double>(model.end(first + bin) - model.begin(first + bin));
    model.add_time(first + bin, 1000 * width);
    for (Cell requests = 0; requests < (bin % 2 == 0 ? 2U : 4U); ++requests) {
      for (int block = 0; block < 100; ++block) model.add_use(first + bin);
      model.end_request();
    }
  }
  model.learn(kNothingPending, 0);
  for (Cell bin = 0; bin < 7; ++bin) {
    EXPECT_GE(model.worth(first + bin), model.worth(first + bin + 1) * 0.999) << bin;
  }
}

// Blocks that nobody has used again yet are why a rate is low.
TEST(ReuseModelTest, TimeOfBlocksThatAreStillThereCounts) {
  ReuseModel with(kCapacity);
  ReuseModel without(kCapacity);
  const Cell cell = ReuseModel::first_cell(1, 1, false) + 5;
  for (ReuseModel* model : {&with, &without}) {
    for (int use = 0; use < 20; ++use) {
      model->add_time(cell, 100);
      model->add_use(cell);
      model->end_request();
    }
  }
  std::vector<double> pending(kNothingPending);
  pending[cell] = 200'000;
  with.learn(pending, 0);
  without.learn(kNothingPending, 0);
  EXPECT_LT(with.worth(cell), without.worth(cell) / 20);
}

/// Rounds in which blocks used twice live, and what the model learns after each.
template <typename Rate> void live_rounds(ReuseModel& model, const Rate& rate) {
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    for (const std::uint32_t turn : {1U, 3U}) {
      for (const bool after_long : {false, true}) {
        live(model, ReuseModel::first_cell(2, turn, after_long), 100, random,
             [&](std::size_t /*bin*/) { return rate(turn, after_long); });
      }
    }
    model.learn(kNothingPending, 100);
  }
}

TEST(ReuseModelTest, WhatTellsReuseIsFoundOut) {
  ReuseModel by_gap(kCapacity);
  live_rounds(by_gap, [](std::uint32_t, bool after_long) { return after_long ? 2e-4 : 2e-3; });
  ReuseModel by_turn(kCapacity);
  live_rounds(by_turn, [](std::uint32_t turn, bool) { return turn == 1 ? 2e-4 : 2e-3; });
  for (const std::uint32_t turn : {1U, 3U}) {
    for (const bool after_long : {false, true}) {
      const Cell cell = ReuseModel::first_cell(2, turn, after_long);
      EXPECT_NEAR(std::log(by_gap.worth(cell) / (after_long ? 2e-4 : 2e-3)), 0, 0.3) << turn;
      EXPECT_NEAR(std::log(by_turn.worth(cell) / (turn == 1 ? 2e-4 : 2e-3)), 0, 0.3) << turn;
    }
  }
  EXPECT_FALSE(by_gap.is_long(4 * kCapacity));
  EXPECT_TRUE(by_gap.is_long(4 * kCapacity + 1));
}

TEST(ReuseModelTest, WhatIsOldCountsLess) {
  ReuseModel model(kCapacity);
  std::mt19937 random(4);
  const Cell first = ReuseModel::first_cell(1, 1, false);
  live(model, first, 2'000, random, [](std::size_t) { return 2e-3; });
  model.learn(kNothingPending, 0);
  EXPECT_NEAR(std::log(model.worth(first) / 2e-3), 0, 0.25);
  model.learn(kNothingPending, 5e6);  // blocks used since
  live(model, first, 500, random, [](std::size_t) { return 1e-4; });
  model.learn(kNothingPending, 0);
  EXPECT_NEAR(std::log(model.worth(first) / 1e-4), 0, 0.4);
}

}  // namespace
}  // namespace kvferry::cache_manager
