// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/strategy_choice.hpp"

#include "cache_manager/calibration/curves.hpp"
#include "mover/strategy_chooser.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

namespace kvferry::cache_manager {
namespace {

using ipc::CopyDirection;
using testing::ElementsAre;

constexpr std::uint64_t kSlotBytes = 8ULL << 20;
constexpr StagingSlots kSlots{kSlotBytes, 8};
constexpr std::uint32_t kOne = 1;
const std::vector<CopyStrategy> kAll(kMeasuredStrategies.begin(), kMeasuredStrategies.end());

std::optional<CopyStrategy> choice(const Calibration& calibration,
                                   std::uint32_t blocks,
                                   bool alone,
                                   const HandOverCost& cost = {},
                                   const std::vector<CopyStrategy>& possible = kAll) {
  const JobShape job{CopyDirection::kDeviceToHost, {&blocks, 1}, alone, kSlots};
  return choose_calibrated(calibration, possible, job, cost);
}

TEST(StrategyChoiceTest, AFewBlocksAloneGoStridedAndManyAreGathered) {
  const Calibration h200 = samples::h200();
  EXPECT_EQ(choice(h200, 1, true), CopyStrategy::kStrided);
  EXPECT_EQ(choice(h200, 4, true), CopyStrategy::kStrided);
  EXPECT_EQ(choice(h200, 64, true), CopyStrategy::kStaged);
  EXPECT_EQ(choice(h200, 1000, true), CopyStrategy::kStaged);
}

TEST(StrategyChoiceTest, AmongOtherJobsNobodyWaitsForAHandOver) {
  EXPECT_EQ(choice(samples::h200(), 1, false), CopyStrategy::kStaged);
  EXPECT_EQ(choice(samples::h200(), 64, false), CopyStrategy::kStaged);
}

TEST(StrategyChoiceTest, GathersThatComputeSlowsDownAreLeft) {
  const HandOverCost beside_gemm{400, 60};  // 17 GB/s
  EXPECT_EQ(choice(samples::h200(), 64, true, beside_gemm), CopyStrategy::kStrided);
  EXPECT_EQ(choice(samples::h200(), 64, false, beside_gemm), CopyStrategy::kStrided);
}

TEST(StrategyChoiceTest, AmongOthersTheRingsSlotsLimitHandOversOfSmallJobs) {
  // 8 slots, each a millisecond away: 125 us for a slot, however little is in it.
  const HandOverCost slow{1000, 0};
  EXPECT_EQ(choice(samples::h200(), 1, false, slow), CopyStrategy::kStrided);
  EXPECT_EQ(choice(samples::h200(), 4, false, slow), CopyStrategy::kStaged);
}

TEST(StrategyChoiceTest, WhatIsNotPossibleIsNotChosen) {
  EXPECT_EQ(choice(samples::h200(), 64, true, {}, {CopyStrategy::kBatch, CopyStrategy::kMemcpy}),
            CopyStrategy::kBatch);
  EXPECT_EQ(choice(samples::h200(), 64, true, {}, {}), std::nullopt);
}

TEST(StrategyChoiceTest, WhatCostsMoreThanTimeMustBeWorthIt) {
  Calibration close = samples::h200();
  close.to_host = {samples::curves({{0, 100}, {0, 104}, {0, 200}, {0, 300}})};
  EXPECT_EQ(choice(close, 16, false), CopyStrategy::kStrided) << "4 % are not";
  close.to_host = {samples::curves({{0, 100}, {0, 106}, {0, 200}, {0, 300}})};
  EXPECT_EQ(choice(close, 16, false), CopyStrategy::kStaged);
  close.to_host = {samples::curves({{0, 200}, {0, 200}, {0, 104}, {0, 100}})};
  EXPECT_EQ(choice(close, 16, false), CopyStrategy::kBatch) << "nor a call for every chunk";
}

TEST(StrategyChoiceTest, WhatIsNotMuchFasterThanTheRuleDoesNotTakeItsPlace) {
  Calibration close = samples::h200();
  close.to_host = {samples::curves({{0, 100}, {0, 105}, {0, 97}, {0, 300}})};
  const auto chosen = [&close](std::optional<CopyStrategy> rule) {
    const std::uint32_t blocks = 16;
    return choose_calibrated(
        close, kAll, {CopyDirection::kDeviceToHost, {&blocks, 1}, false, kSlots, false, rule}, {});
  };
  EXPECT_EQ(chosen(std::nullopt), CopyStrategy::kBatch);
  EXPECT_EQ(chosen(CopyStrategy::kStrided), CopyStrategy::kStrided) << "by 8 %";
  EXPECT_EQ(chosen(CopyStrategy::kMemcpy), CopyStrategy::kBatch) << "a rule three times as slow";
  EXPECT_EQ(chosen(CopyStrategy::kStaged), CopyStrategy::kStaged) << "what it costs is known";
  close.to_host = {samples::curves({{0, 100}, {0, 120}, {0, 95}, {0, 300}})};
  EXPECT_EQ(chosen(CopyStrategy::kStrided), CopyStrategy::kBatch);
}

TEST(StrategyChoiceTest, EstimatesFollowTheCurveBetweenAndBeyondItsPoints) {
  const Calibration h200 = samples::h200();
  const auto estimate = [&h200](CopyStrategy strategy, std::uint32_t blocks, bool alone) {
    const JobShape job{CopyDirection::kDeviceToHost, {&blocks, 1}, alone, kSlots};
    return estimate_us(h200, strategy, job, {100, 3}).value();
  };
  EXPECT_DOUBLE_EQ(estimate(CopyStrategy::kStrided, 1, true), 53);
  EXPECT_DOUBLE_EQ(estimate(CopyStrategy::kStrided, 10, true), 2 + 10 * 51);
  EXPECT_DOUBLE_EQ(estimate(CopyStrategy::kStrided, 320, true), 10 * (2 + 32 * 51));
  EXPECT_DOUBLE_EQ(estimate(CopyStrategy::kStaged, 1, true), 3 + 38.3 + 100 + 2 * 3);
  EXPECT_DOUBLE_EQ(estimate(CopyStrategy::kStaged, 16, true), 3 + 16 * 38.3 + 100 + 8 * 3);
  EXPECT_DOUBLE_EQ(estimate(CopyStrategy::kStaged, 16, false), 3 + 16 * 38.3);
  const JobShape one_block{CopyDirection::kDeviceToHost, {&kOne, 1}, false, kSlots};
  EXPECT_DOUBLE_EQ(estimate_us(h200, CopyStrategy::kStaged, one_block, {800, 4}).value(),
                   (800 + 2 * 4) / 8.0);
}

TEST(StrategyChoiceTest, GroupsOfAJobAddUpAndOneThatIsUnknownMakesTheJobUnknown) {
  Calibration two = samples::h200();
  two.to_host.push_back(samples::curves({{0, 10}, {0, 20}, {0, 30}, {0, 40}}));
  std::array<std::uint32_t, 2> blocks{4, 16};
  JobShape job{CopyDirection::kDeviceToHost, blocks, true, kSlots};
  EXPECT_DOUBLE_EQ(estimate_us(two, CopyStrategy::kStrided, job, {}).value(), 2 + 4 * 51 + 16 * 20);
  two.to_host[1] = {};
  EXPECT_EQ(estimate_us(two, CopyStrategy::kStrided, job, {}), std::nullopt);
  EXPECT_EQ(choose_calibrated(two, kAll, job, {}), std::nullopt);
  blocks[1] = 0;
  EXPECT_NE(choose_calibrated(two, kAll, job, {}), std::nullopt) << "no block of it";
  std::array<std::uint32_t, 3> more{1, 0, 1};
  job.blocks = more;
  EXPECT_EQ(choose_calibrated(two, kAll, job, {}), std::nullopt) << "no such group";
}

TEST(StrategyChoiceTest, TheChoicesAreSaidByJobSize) {
  const JobShape alone{CopyDirection::kDeviceToHost, {}, true, kSlots};
  JobShape among = alone;
  among.alone = false;
  const std::string text = describe_choices(samples::h200(), kAll, alone, {});
  EXPECT_THAT(text, testing::MatchesRegex("strided up to [0-9]+ blocks, staged"));
  EXPECT_EQ(describe_choices(samples::h200(), kAll, among, {}), "staged");
}

ipc::MoverJob job_of(std::uint32_t blocks) {
  ipc::MoverJob job;
  job.direction = CopyDirection::kDeviceToHost;
  for (std::uint32_t i = 0; i < blocks; ++i) {
    job.items.push_back({ipc::GroupId{0}, ipc::BlockId{i}, 0, 0, true});
  }
  return job;
}

TEST(StrategyChooserTest, UsesItsRuleOfThumbUntilItHasACalibrationAndWhereThatKnowsNothing) {
  auto geometry = ipc::load_geometry("llama-3-8b", 1);
  ASSERT_TRUE(geometry.has_value());
  ipc::ArenaOptions options;
  options.gpu_blocks = 16;
  options.staging_slots = 4;
  options.staging_slot_bytes = kSlotBytes;
  const auto layout = ipc::plan_arena(*geometry, options);
  ASSERT_TRUE(layout.has_value());
  StrategyChooser chooser(CopyStrategy::kBatch, *layout);
  EXPECT_EQ(chooser.choose(job_of(1), true, {}, {std::nullopt}), CopyStrategy::kBatch);
  chooser.adopt(std::make_shared<const Calibration>(samples::h200()));
  EXPECT_EQ(chooser.choose(job_of(1), true, {}, {std::nullopt}), CopyStrategy::kStrided);
  EXPECT_EQ(chooser.choose(job_of(64), true, {}, {std::nullopt}), CopyStrategy::kStaged);
  EXPECT_EQ(chooser.choose(job_of(0), true, {}, {std::nullopt}), CopyStrategy::kBatch);
  ipc::MoverJob hostile = job_of(1);
  hostile.items[0].group = ipc::GroupId{1'000'000};  // fails later; until then nothing is known
  EXPECT_EQ(chooser.choose(hostile, true, {}, {std::nullopt}), CopyStrategy::kBatch);
}

TEST(StrategyChooserTest, RowsTakeThePlaceOfGathersWhileTheWorkerComputesWhereTheyAreWorthIt) {
  const auto chosen = [](const char* name, std::uint32_t ranks, CopyStrategy rule,
                         ipc::ArenaOrder order, std::optional<bool> computing) {
    ipc::ArenaOptions options;
    options.gpu_blocks = 16;
    options.order = order;
    options.staging_slots = 4;
    options.staging_slot_bytes = kSlotBytes;
    const auto layout = ipc::plan_arena(ipc::load_geometry(name, ranks).value(), options).value();
    return StrategyChooser(rule, layout).choose(job_of(4), true, {}, {computing});
  };
  using Order = ipc::ArenaOrder;
  constexpr auto kStaged = CopyStrategy::kStaged;
  EXPECT_EQ(chosen("llama-3-8b", 1, kStaged, Order::kLayerFirst, true), CopyStrategy::kStrided);
  EXPECT_EQ(chosen("llama-3-8b", 2, kStaged, Order::kLayerFirst, true), CopyStrategy::kStrided);
  EXPECT_EQ(chosen("llama-3-8b", 1, kStaged, Order::kLayerFirst, false), kStaged);
  EXPECT_EQ(chosen("llama-3-8b", 1, kStaged, Order::kLayerFirst, std::nullopt), kStaged);
  // Rows of 4 KiB; none at all; a rule that is not to gather.
  EXPECT_EQ(chosen("llama-3-8b", 8, kStaged, Order::kLayerFirst, true), kStaged);
  EXPECT_EQ(chosen("llama-3-8b", 1, kStaged, Order::kLayerFirstMany, true), kStaged);
  EXPECT_EQ(chosen("llama-3-8b", 1, CopyStrategy::kBatch, Order::kLayerFirst, true),
            CopyStrategy::kBatch);
}

ipc::ArenaLayout ringed_layout(std::uint32_t staging_slots) {
  ipc::ArenaOptions options;
  options.gpu_blocks = 16;
  options.staging_slots = staging_slots;
  options.staging_slot_bytes = kSlotBytes;
  return ipc::plan_arena(ipc::load_geometry("llama-3-8b", 1).value(), options).value();
}

ipc::MoverJob load_of(std::uint8_t priority) {
  ipc::MoverJob load = job_of(64);
  load.direction = CopyDirection::kHostToDevice;
  load.urgency.priority = priority;
  return load;
}

TEST(StrategyChooserTest, WhatIsFetchedAheadTakesNoMultiprocessors) {
  const ipc::ArenaLayout layout = ringed_layout(4);
  const StrategyChooser chooser(CopyStrategy::kStaged, layout);
  ipc::MoverJob load = load_of(ipc::Urgency::kAhead);
  EXPECT_EQ(chooser.choose(load, true, {}, {false}), CopyStrategy::kStrided);
  load.urgency.priority = ipc::Urgency::kOrdinary;
  EXPECT_EQ(chooser.choose(load, true, {}, {false}), CopyStrategy::kStaged);
  EXPECT_EQ(chooser.choose(job_of(64), true, {}, {false}), CopyStrategy::kStaged) << "a store";
}

TEST(StrategyChooserTest, OfJobsBesideComputeAShareIsGathered) {
  const ipc::ArenaLayout layout = ringed_layout(16);
  for (const std::uint32_t percent : {0U, 25U, 40U, 100U}) {
    const StrategyChooser chooser(CopyStrategy::kStaged, layout, {.gathered_percent = percent});
    constexpr int kJobs = 2000;
    int gathered = 0;
    for (int i = 0; i < kJobs; ++i) {
      if (chooser.choose(job_of(4), false, {}, {true}) == CopyStrategy::kStaged) ++gathered;
      EXPECT_EQ(chooser.choose(job_of(4), true, {}, {true}), CopyStrategy::kStrided)
          << "alone: the link is not what it waits for";
    }
    EXPECT_NEAR(gathered, kJobs * percent / 100, 1) << percent;
    const HandOverCost beside_gemm{400, 60};
    EXPECT_EQ(chooser.choose(job_of(4), false, beside_gemm, {true}), CopyStrategy::kStrided)
        << "kernels that wait for their turn do not keep a link busy";
    EXPECT_EQ(chooser.choose(job_of(4), false, {}, {false}), CopyStrategy::kStaged);
  }
}

TEST(StrategyChooserTest, LoadsThatComputeWaitsForAreGatheredBesideIt) {
  const ipc::ArenaLayout layout = ringed_layout(16);
  const StrategyChooser chooser(CopyStrategy::kStaged, layout);
  ipc::MoverJob load = load_of(ipc::Urgency::kOrdinary);
  const StrategyChooser::Compute waits{true, true};
  EXPECT_EQ(chooser.choose(load, false, {}, {true}), CopyStrategy::kStrided);
  EXPECT_EQ(chooser.choose(load, false, {}, waits), CopyStrategy::kStaged);
  const HandOverCost beside_gemm{400, 60};
  EXPECT_EQ(chooser.choose(load, false, beside_gemm, waits), CopyStrategy::kStrided)
      << "kernels that wait for their turn do not keep a link busy";
  load.urgency.priority = ipc::Urgency::kAhead;
  EXPECT_EQ(chooser.choose(load, false, {}, waits), CopyStrategy::kStrided);
}

TEST(StrategyChooserTest, GathersBesideComputeHaveToBeFasterByMore) {
  const std::uint32_t blocks = 64;
  JobShape job{CopyDirection::kDeviceToHost, {&blocks, 1}, true, {kSlotBytes, 8}};
  EXPECT_EQ(choose_calibrated(samples::h200(), kAll, job, {}), CopyStrategy::kStaged);
  job.beside_compute = true;
  EXPECT_EQ(choose_calibrated(samples::h200(), kAll, job, {}), CopyStrategy::kStrided);
}

TEST(StrategyChooserTest, AnArenaOffersWhatItCanDo) {
  auto geometry = ipc::load_geometry("llama-3-8b", 1);
  ASSERT_TRUE(geometry.has_value());
  ipc::ArenaOptions options;
  options.gpu_blocks = 16;
  EXPECT_THAT(possible_strategies(*ipc::plan_arena(*geometry, options)),
              ElementsAre(CopyStrategy::kStrided, CopyStrategy::kBatch, CopyStrategy::kMemcpy));
  options.order = ipc::ArenaOrder::kLayerFirstMany;
  options.staging_slots = 4;
  options.staging_slot_bytes = kSlotBytes;
  EXPECT_THAT(possible_strategies(*ipc::plan_arena(*geometry, options)),
              ElementsAre(CopyStrategy::kStaged, CopyStrategy::kBatch, CopyStrategy::kMemcpy));
}

class StrategyChoicePropertyTest : public testing::TestWithParam<int> {};

TEST_P(StrategyChoicePropertyTest, NothingIsChosenThatIsSlowerThanAnotherByMoreThanTheMargin) {
  std::mt19937_64 random(static_cast<std::uint64_t>(GetParam()));
  const auto pick = [&random](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random);
  };
  Calibration calibration;
  std::vector<samples::Cost> costs;
  for (int i = 0; i < 4; ++i) costs.push_back({pick(0, 300), pick(1, 400)});
  calibration.to_host = {samples::curves(costs)};
  calibration.to_device = calibration.to_host;
  const HandOverCost cost{pick(0, 1000), pick(0, 100)};
  std::vector<CopyStrategy> possible = kAll;
  std::shuffle(possible.begin(), possible.end(), random);
  possible.resize(static_cast<std::size_t>(pick(1, 4.99)));
  for (const bool alone : {true, false}) {
    for (const std::uint32_t blocks : {1U, 2U, 3U, 7U, 30U, 33U, 1000U, 1U << 20U}) {
      const JobShape job{CopyDirection::kHostToDevice, {&blocks, 1}, alone, kSlots};
      const auto chosen = choose_calibrated(calibration, possible, job, cost);
      ASSERT_TRUE(chosen.has_value());
      EXPECT_NE(std::find(possible.begin(), possible.end(), *chosen), possible.end());
      const double us = estimate_us(calibration, *chosen, job, cost).value();
      for (const CopyStrategy other : possible) {
        EXPECT_LE(us, kCostlyMargin * estimate_us(calibration, other, job, cost).value());
      }
      // A dearer hand-over never makes staging the choice, a slower machine changes nothing.
      const HandOverCost dearer{cost.base_us + 50, cost.us_per_mib + 5};
      if (*chosen != CopyStrategy::kStaged) {
        EXPECT_EQ(choose_calibrated(calibration, possible, job, dearer), chosen);
      }
      Calibration slower = calibration;
      for (StrategyCurve& curve : slower.to_device[0].strategies) {
        for (double& one : curve.us) one *= 4;
      }
      EXPECT_EQ(choose_calibrated(slower, possible, job, {4 * cost.base_us, 4 * cost.us_per_mib}),
                chosen);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, StrategyChoicePropertyTest, testing::Range(0, 50));

}  // namespace
}  // namespace kvferry::cache_manager
