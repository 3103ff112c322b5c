// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>

namespace kvferry::cli {
namespace {

using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

Samples samples(std::initializer_list<double> values) {
  Samples all;
  for (const double value : values) all.add(value);
  return all;
}

BenchFigure figure(BenchPath path, const std::string& strategy, std::uint32_t blocks) {
  BenchFigure made;
  made.bench = "transfer";
  made.strategy = strategy;
  made.path = path;
  made.point = {"", 16384, 64, 1 << 20, blocks, Way::kToHost, Locality::kRandom};
  made.gbps = samples({11, 10, 12});
  made.share = 0.5;
  return made;
}

TEST(BenchSamplesTest, QuantilesAreValuesAndTheMedianIsTheMiddle) {
  EXPECT_EQ(samples({3}).median(), 3);
  EXPECT_EQ(samples({4, 1, 2}).median(), 2);
  EXPECT_EQ(samples({4, 1, 2, 3}).median(), 2.5);
  EXPECT_EQ(samples({4, 1, 2, 3}).least(), 1);
  EXPECT_EQ(samples({4, 1, 2, 3}).most(), 4);
  Samples hundred;
  for (int i = 100; i > 0; --i) hundred.add(i);
  EXPECT_EQ(hundred.quantile(0.99), 99);
}

TEST(BenchReportTest, TellsMediansAndWhatWasNotMeasuredAsNull) {
  BenchReport report;
  report.device = "a device";
  report.limit.to_host = samples({20, 22});
  report.figures = {figure(BenchPath::kEngine, "staged", 4)};
  const nlohmann::json json = to_json(report);
  EXPECT_EQ(json["device"], "a device");
  EXPECT_EQ(json["limit"]["d2h"], 21);
  EXPECT_TRUE(json["limit"]["both"].is_null());
  const nlohmann::json& result = json["results"][0];
  EXPECT_EQ(result["bench"], "transfer");
  EXPECT_EQ(result["strategy"], "staged");
  EXPECT_EQ(result["direction"], "d2h");
  EXPECT_EQ(result["chunk_bytes"], 16384);
  EXPECT_EQ(result["regions"], 64);
  EXPECT_EQ(result["blocks"], 4);
  EXPECT_EQ(result["gbps"], 11);
  EXPECT_EQ(result["gbps_least"], 10);
  EXPECT_EQ(result["share"], 0.5);
  for (const char* field :
       {"us", "slowdown", "itl_p99_ratio", "geometry", "recovery_us", "arena_kept"}) {
    EXPECT_TRUE(result[field].is_null()) << field;
  }
}

TEST(BenchReportTest, OneTableHasAllStrategiesAndJobsOfAWay) {
  BenchReport report;
  report.figures = {figure(BenchPath::kBare, "batch", 1), figure(BenchPath::kEngine, "staged", 1),
                    figure(BenchPath::kEngine, "staged", 16)};
  report.figures[2].cpu_ms_per_gib = 2.5;
  BenchFigure other = figure(BenchPath::kEngine, "staged", 1);
  other.point.way = Way::kToDevice;
  report.figures.push_back(other);
  const std::string text = tables_of(report);
  EXPECT_THAT(text, HasSubstr("                     1 block      16 blocks  CPU ms/GiB\n"
                              "  bare batch     11.00  50.0 %\n"
                              "  engine staged  11.00  50.0 %  11.00  50.0 %         2.5\n"));
  EXPECT_THAT(text, HasSubstr("transfer h2d"));
  EXPECT_THAT(text, Not(HasSubstr("random"))) << "they are all alike in that";
  report.figures[0].point.locality = Locality::kSequential;
  EXPECT_THAT(tables_of(report), HasSubstr("16 blocks, random"));
}

TEST(BenchReportTest, AnAblationShowsBothPathsWithWhatADeathTook) {
  BenchReport report;
  report.figures = {figure(BenchPath::kMover, "staged", 1), figure(BenchPath::kOwn, "staged", 1)};
  for (BenchFigure& each : report.figures) {
    each.bench = "ablation";
    each.us = samples({100, 200, 300});
    each.cpu_ms_per_gib = 12.5;
    each.recovery_us = 71'400;
    each.arena_kept = each.path == BenchPath::kMover;
  }
  const std::string text = tables_of(report);
  EXPECT_THAT(text, HasSubstr("ablation d2h, with a mover and without: 64 regions"));
  EXPECT_THAT(text,
              ContainsRegex("mover staged +1 block +11.00 +50.0 % +200 / 300 +12.5 +71.4  kept"));
  EXPECT_THAT(text, ContainsRegex("own staged +1 block .* 71.4  lost"));
  const nlohmann::json json = to_json(report);
  EXPECT_EQ(json["results"][0]["path"], "mover");
  EXPECT_EQ(json["results"][0]["arena_kept"], true);
  EXPECT_EQ(json["results"][1]["path"], "own");
  EXPECT_EQ(json["results"][1]["arena_kept"], false);
  EXPECT_EQ(json["results"][1]["recovery_us"], 71'400);
}

TEST(BenchReportTest, AnIdleProcessShowsItsShareOfACore) {
  BenchReport report;
  BenchFigure idle;
  idle.bench = "idle";
  idle.strategy = "mover/0";
  idle.core_share = samples({0.0005, 0.0001, 0.002});
  report.figures = {idle};
  idle.point.regions = 8;
  idle.point.chunk_bytes = 4096;
  report.figures.push_back(idle);
  EXPECT_THAT(tables_of(report), ContainsRegex("mover/0 +0.050 +0.200"));
  EXPECT_THAT(tables_of(report), HasSubstr("windows: 8 regions, 4.00 KiB of each\n"));
  EXPECT_DOUBLE_EQ(to_json(report)["results"][0]["core_share"].get<double>(), 0.0005);
}

TEST(BenchReportTest, CopiesBesideComputeShowWhatALargeOneGetsThere) {
  BenchReport report;
  BenchFigure beside = figure(BenchPath::kEngine, "direct", 16);
  beside.bench = "interference";
  beside.load = "decode";
  beside.slowdown = samples({1.01});
  beside.copy_gbps = samples({12.5});
  beside.round_us = RoundTimes{100, 200, 101, 210, 205};
  beside.p99_spread = Spread{1.01, 1.08};
  report.figures = {beside};
  EXPECT_THAT(tables_of(report), HasSubstr(" 88.0 %"));
  EXPECT_THAT(tables_of(report), HasSubstr("1.050 (1.010 to 1.080)"));
  EXPECT_THAT(tables_of(report), HasSubstr("  1.024\n")) << "of one pair no spread is known";
  const nlohmann::json result = to_json(report)["results"][0];
  EXPECT_DOUBLE_EQ(result["copy_gbps"].get<double>(), 12.5);
  EXPECT_DOUBLE_EQ(result["itl_p99_ratio_low"].get<double>(), 1.01);
  EXPECT_DOUBLE_EQ(result["itl_p99_ratio_high"].get<double>(), 1.08);
  EXPECT_TRUE(result["itl_p99_beyond_copy_low"].is_null());
}

TEST(BenchReportTest, KindsOfJobsBesideComputeAreNamedWhereTheyDiffer) {
  BenchReport report;
  BenchFigure beside = figure(BenchPath::kEngine, "auto", 16);
  beside.bench = "interference";
  beside.load = "decode";
  beside.slowdown = samples({1.01});
  BenchFigure copy = beside;
  copy.path = BenchPath::kBare;
  copy.strategy = kOneCopy;
  report.figures = {copy, beside};
  EXPECT_THAT(tables_of(report), ContainsRegex("jobs of 16 blocks\n"));
  report.figures.push_back(beside);
  report.figures.back().point.locality = Locality::kSequential;
  const std::string text = tables_of(report);
  EXPECT_THAT(text, ContainsRegex("engine auto, 16 blocks, random +11.00"));
  EXPECT_THAT(text, ContainsRegex("engine auto, 16 blocks, sequential +11.00"));
  EXPECT_THAT(text, ContainsRegex("bare one copy +11.00")) << "it is of no job";
}

TEST(BenchReportTest, WhatWasLeftBehindIsAFailure) {
  BenchReport report;
  EXPECT_THAT(failures_of(report), IsEmpty());
  report.errors = {"timeout: a copy did not end in time"};
  report.leaked_device_bytes = 1 << 20;
  report.leftover_names = {"/run/x"};
  EXPECT_THAT(failures_of(report),
              ElementsAre(HasSubstr("a copy"), HasSubstr("1.00 MiB"), HasSubstr("/run/x")));
}

}  // namespace
}  // namespace kvferry::cli
