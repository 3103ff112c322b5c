// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "longctx/report.hpp"

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>

#include <string>

namespace kvferry::cli {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr LinkRates kLink{.to_host = 100, .to_device = 50};

TurnRecord turn(double waited_s, double computed_s, std::uint64_t loaded, std::uint64_t stored) {
  return {.waited_s = waited_s,
          .computed_s = computed_s,
          .loaded_bytes = loaded,
          .stored_bytes = stored};
}

TEST(LeastWaitTest, IsWhatTheLinkTakesLessTheComputeOfTheTurnBefore) {
  const TurnRecord before = turn(0, 4, 0, 0);
  EXPECT_DOUBLE_EQ(least_wait(turn(0, 9, 500, 0), before, kLink), 6);
  EXPECT_DOUBLE_EQ(least_wait(turn(0, 9, 500, 1500), before, kLink), 11) << "the slower way counts";
}

TEST(LeastWaitTest, IsNothingWhenComputeHidesAll) {
  EXPECT_EQ(least_wait(turn(0, 9, 500, 0), turn(0, 10, 0, 0), kLink), 0);
  EXPECT_EQ(least_wait(turn(0, 9, 0, 0), turn(0, 0, 0, 0), kLink), 0);
}

TEST(LeastWaitTest, OfATurnInWindowsIsWhatItStreamsLessItsOwnCompute) {
  TurnRecord streams = turn(0, 4, 0, 0);
  streams.streamed_bytes = 500;
  EXPECT_DOUBLE_EQ(least_wait(streams, turn(0, 9, 0, 0), kLink), 6);
  EXPECT_DOUBLE_EQ(least_wait({streams}, kLink), 6) << "the first one, too";
  EXPECT_DOUBLE_EQ(least_wait(turn(0, 1, 100, 0), streams, kLink), 2) << "it hides nothing more";
  streams.streamed_bytes = 150;
  EXPECT_EQ(least_wait(streams, turn(0, 9, 0, 0), kLink), 0);
  EXPECT_DOUBLE_EQ(least_wait(turn(0, 1, 100, 0), streams, kLink), 1) << "3 of 4 s hide its own";
}

TEST(LeastWaitTest, SumsTurnsAndNoTurnMakesUpForAnother) {
  EXPECT_DOUBLE_EQ(
      least_wait({turn(0, 1, 1000, 0), turn(0, 100, 100, 0), turn(0, 1, 100, 0)}, kLink), 1);
  EXPECT_EQ(least_wait({}, kLink), 0);
}

LongctxConfig small_config() {
  LongctxConfig config;
  config.geometry_name = "tiny";
  config.geometry = *ipc::load_geometry("tiny", 1);
  config.context = 100;
  config.sequences = 8;
  config.steps = 28;
  config.slice = 4;
  return config;
}

TEST(LongctxSizesTest, DefaultsAreAQuarterOfTheBlocksAndHostMemoryForAll) {
  const auto sizes = decide_sizes(small_config(), 0, 0);
  ASSERT_TRUE(sizes);
  EXPECT_EQ(sizes->sequence_blocks, 8U);
  EXPECT_EQ(sizes->all_blocks, 64U);
  EXPECT_EQ(sizes->gpu_blocks, 16U);
  EXPECT_EQ(sizes->active_blocks, 8U);
  EXPECT_EQ(sizes->oversubscription(), 4);
  EXPECT_EQ(sizes->host_needed, 72U * sizes->block_bytes);
  EXPECT_GE(sizes->host_bytes, sizes->host_needed);
}

TEST(LongctxSizesTest, HostMemoryThatIsTooSmallIsToldWithBothNumbersAndTheRemedy) {
  LongctxConfig config = small_config();
  config.host_memory = 1U << 20;
  const auto refused = decide_sizes(config, 0, 0);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message,
              AllOf(HasSubstr("2.25 MiB"), HasSubstr("1.00 MiB"), HasSubstr("give more")));
}

TEST(LongctxSizesTest, WhatDoesNotFitIsToldWithBothNumbersAndTheRemedy) {
  LongctxConfig config = small_config();
  config.gpu_blocks = 1;
  EXPECT_THAT(decide_sizes(config, 0, 0).error().message,
              AllOf(HasSubstr("has 8 blocks"), HasSubstr("gives 1: give 2 at least")));
  config.gpu_blocks.reset();
  EXPECT_THAT(decide_sizes(config, 1U << 20, 0).error().message,
              AllOf(HasSubstr("1.00 MiB available"), HasSubstr("give less")));
  config.devices.kind = ipc::DeviceKind::kCuda;
  EXPECT_THAT(decide_sizes(config, 0, 1U << 10).error().message,
              AllOf(HasSubstr("512.0 KiB"), HasSubstr("1.00 KiB"), HasSubstr("--gpu-blocks")));
}

TEST(LongctxSizesTest, OneAfterTheOtherIsComparedWithWhereTheDeviceNeverHoldsAll) {
  LongctxConfig config = small_config();
  config.devices.kind = ipc::DeviceKind::kCuda;
  EXPECT_TRUE(decide_sizes(config, 0, std::uint64_t{64} * 32'768)->has_large_arena());
  const auto sizes = decide_sizes(config, 0, std::uint64_t{64} * 32'768 - 1);
  EXPECT_FALSE(sizes->has_large_arena());
  EXPECT_EQ(sizes->reference_blocks, 16U);
}

TEST(LongctxSizesTest, ASequenceThatIsLargerThanTheDeviceIsComparedWithWhereItFitsIfAnywhere) {
  LongctxConfig config = small_config();
  config.devices.kind = ipc::DeviceKind::kCuda;
  config.gpu_blocks = 5;
  EXPECT_TRUE(decide_sizes(config, 0, std::uint64_t{8} * 32'768)->in_windows());
  EXPECT_EQ(decide_sizes(config, 0, std::uint64_t{8} * 32'768)->reference_blocks, 8U);
  EXPECT_EQ(decide_sizes(config, 0, std::uint64_t{8} * 32'768 - 1)->reference_blocks, 0U);
  config.gpu_blocks = 8;
  EXPECT_FALSE(decide_sizes(config, 0, 0)->in_windows());
}

TEST(LongctxSizesTest, AGroupThatForgetsTokensIsRefused) {
  LongctxConfig config = small_config();
  config.geometry_name = "tiny-window";
  config.geometry = *ipc::load_geometry("tiny-window", 1);
  EXPECT_THAT(decide_sizes(config, 0, 0).error().message, HasSubstr("group 'window'"));
}

LongctxReport small_report() {
  LongctxReport report;
  report.config = small_config();
  report.sizes = *decide_sizes(report.config, 0, 0);
  report.link = kLink;
  LongctxFigures run;
  run.checksums = {1, 2};
  run.tokens = 200;
  run.turns = {turn(0, 4, 0, 0), turn(3, 3, 300, 10)};
  report.no_swap = report.look_ahead = report.without = run;
  return report;
}

TEST(LongctxReportTest, TellsTheWaitBesideItsBound) {
  const auto json = to_json(small_report());
  EXPECT_EQ(json["context"], 100);
  EXPECT_EQ(json["sequences"], 8);
  EXPECT_EQ(json["gpu_blocks"], 16);
  EXPECT_EQ(json["oversubscription"], 4);
  EXPECT_EQ(json["tokens_per_s"], 20);
  EXPECT_EQ(json["tokens_per_s_no_swap"], 20);
  EXPECT_EQ(json["waiting_s"], 3);
  EXPECT_DOUBLE_EQ(json["waiting_share"], 0.3);
  EXPECT_DOUBLE_EQ(json["bound_s"], 2);
  EXPECT_DOUBLE_EQ(json["waiting_over_bound"], 1.5);
  EXPECT_EQ(json["bytes_to_device"], 300);
  EXPECT_EQ(json["bytes_to_host"], 10);
  EXPECT_EQ(json["without_lookahead"]["waiting_s"], 3);
  EXPECT_EQ(json["outputs_equal"], true);
}

TEST(LongctxReportTest, ABoundOfNothingHasNoRatio) {
  LongctxReport report = small_report();
  report.look_ahead->turns = {turn(0, 4, 0, 0), turn(0.5, 3, 100, 0)};
  EXPECT_TRUE(to_json(report)["waiting_over_bound"].is_null());
  EXPECT_THAT(table_of(report), HasSubstr("look-ahead"));
}

TEST(LongctxReportTest, OfSimulatedDevicesNoBoundIsKnownAndItSaysSo) {
  LongctxReport report = small_report();
  EXPECT_THAT(table_of(report), AllOf(HasSubstr("bound: for each turn"), HasSubstr("2.000")));
  report.is_simulated = true;
  const auto json = to_json(report);
  EXPECT_TRUE(json["bound_s"].is_null());
  EXPECT_TRUE(json["waiting_over_bound"].is_null());
  EXPECT_TRUE(json["without_lookahead"]["bound_s"].is_null());
  EXPECT_EQ(json["waiting_s"], 3);
  EXPECT_THAT(table_of(report),
              AllOf(HasSubstr("bound: none is known"), testing::Not(HasSubstr("2.000"))));
}

TEST(LongctxReportTest, WaitsInATurnInWindowsCountAndTheBoundIsExplained) {
  LongctxReport report = small_report();
  EXPECT_EQ(to_json(report)["in_windows"], false);
  EXPECT_THAT(table_of(report), testing::Not(HasSubstr("in windows")));
  report.config.gpu_blocks = 5;
  report.sizes = *decide_sizes(report.config, 0, 0);
  report.look_ahead->turns[1].stalled_s = 2;
  report.look_ahead->turns[1].streamed_bytes = 250;
  const auto json = to_json(report);
  EXPECT_EQ(json["in_windows"], true);
  EXPECT_EQ(json["waiting_s"], 5);
  EXPECT_EQ(json["decode_s"], 12);
  EXPECT_EQ(json["bytes_in_turns"], 250);
  EXPECT_EQ(json["bytes_to_device"], 550);
  EXPECT_DOUBLE_EQ(json["bound_s"], 4) << "2 before the turn, 2 in it";
  EXPECT_THAT(table_of(report), AllOf(HasSubstr("each has 8 blocks, more than the device"),
                                      HasSubstr("in windows: a turn's sequence")));
  report.sizes.reference_blocks = 0;
  EXPECT_THAT(table_of(report), HasSubstr("no run without swaps"));
}

TEST(LongctxReportTest, OtherOutputsAreAFailure) {
  LongctxReport report = small_report();
  EXPECT_THAT(failures_of(report), IsEmpty());
  report.look_ahead->checksums[1] = 3;
  EXPECT_EQ(to_json(report)["outputs_equal"], false);
  EXPECT_THAT(failures_of(report), testing::ElementsAre(HasSubstr("outputs differ")));
  EXPECT_THAT(table_of(report), HasSubstr("DIFFERENT"));
}

TEST(LongctxReportTest, OneRunAloneIsComparedWithNothing) {
  LongctxReport report = small_report();
  report.no_swap.reset();
  report.without.reset();
  EXPECT_TRUE(to_json(report)["outputs_equal"].is_null());
  EXPECT_TRUE(to_json(report)["tokens_per_s_no_swap"].is_null());
  EXPECT_THAT(table_of(report), HasSubstr("not compared"));
}

}  // namespace
}  // namespace kvferry::cli
