// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/plot.hpp"
#include "cli/svg_checks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <utility>

namespace kvferry::cli {
namespace {

using test::flaw_of;
using test::Points;
using test::points_of;
using testing::HasSubstr;
using testing::Not;

constexpr std::array kBlocks = {1U, 16U, 64U};

BenchFigure transfer(
    BenchPath path, std::uint64_t chunk, std::uint32_t blocks, Way way, double gbps) {
  BenchFigure made;
  made.bench = "transfer";
  made.strategy = path == BenchPath::kBare ? "memcpy" : "staged";
  made.path = path;
  made.point = {"", chunk, 64, 1 << 20, blocks, way, Locality::kRandom};
  made.gbps.add(gbps);
  return made;
}

BenchReport sample() {
  BenchReport report;
  report.device = "a <device>";
  report.arena = "layer-first";
  for (const Way way : {Way::kToHost, Way::kBoth}) {
    report.limit.of(way).add(way == Way::kBoth ? 90 : 50);
    for (const std::uint64_t chunk : {16384ULL, 32768ULL}) {
      for (const std::uint32_t blocks : kBlocks) {
        const double gbps = static_cast<double>(chunk / 4096 + blocks);
        report.figures.push_back(transfer(BenchPath::kEngine, chunk, blocks, way, gbps));
        report.figures.push_back(transfer(BenchPath::kBare, chunk, blocks, way, gbps / 2));
      }
    }
  }
  return report;
}

TEST(BenchPlotTest, IsWellFormedWhateverItShows) {
  EXPECT_EQ(flaw_of(draw_bench(sample())), "");
  EXPECT_THAT(draw_bench(sample()), HasSubstr("a &lt;device&gt;; 1 rank, layer-first arena"));
  BenchReport none;
  EXPECT_EQ(flaw_of(draw_bench(none)), "");
  EXPECT_THAT(draw_bench(none), HasSubstr("no transfer and no interference was measured"));
  BenchReport one = sample();
  one.figures.resize(1);
  EXPECT_EQ(flaw_of(draw_bench(one)), "");
  EXPECT_THAT(draw_bench(one), Not(HasSubstr("<polyline"))) << "of one point it shows nothing";
}

TEST(BenchPlotTest, ShowsTheLinkOfOneRankAndCurvesOfEachLocality) {
  BenchReport report = sample();
  EXPECT_THAT(draw_bench(report), HasSubstr("the link"));
  report.ranks = 2;
  EXPECT_THAT(draw_bench(report), Not(HasSubstr("the link")));
  for (const double gbps : {5.0, 6.0}) {
    BenchFigure figure =
        transfer(BenchPath::kEngine, 16384, gbps == 5.0 ? 1 : 16, Way::kToHost, gbps);
    figure.strategy = "batch";
    report.figures.push_back(figure);
    figure.point.locality = Locality::kSequential;
    report.figures.push_back(figure);
  }
  EXPECT_THAT(draw_bench(report), HasSubstr(">16 seq<"));
  EXPECT_EQ(points_of(draw_bench(report), "batch").size(), 2U) << "one locality a curve";
}

TEST(BenchPlotTest, EveryFigureStandsAtItsPlaceAndCachesAreApart) {
  const BenchReport report = sample();
  const BenchPlotScale scale = bench_plot_scale(report);
  EXPECT_EQ(scale.jobs, 6U);
  EXPECT_GE(scale.most_gbps, 90);
  EXPECT_LE(scale.most_gbps, 2.6 * 90);
  std::string svg = draw_bench(report);
  for (const std::size_t panel : {0U, 1U}) {
    for (const char* style : {"staged", "memcpy bare"}) {
      const double part = std::string(style) == "staged" ? 1 : 0.5;
      for (const std::size_t cache : {0U, 1U}) {
        const Points points = points_of(svg, style);
        ASSERT_EQ(points.size(), 3U) << style << " " << panel << " " << cache;
        for (std::size_t i = 0; i < points.size(); ++i) {
          const double gbps = part * static_cast<double>(4 * (cache + 1) + kBlocks.at(i));
          EXPECT_NEAR(points[i].first, scale.x(3 * cache + i), 0.01);
          EXPECT_NEAR(points[i].second, scale.y(panel, gbps), 0.01);
        }
        const std::string drawn = std::string("class=\"line ") + style + "\" points";
        svg.erase(svg.find(drawn), drawn.size());  // The next one of its style.
      }
    }
  }
}

BenchFigure beside(BenchPath path,
                   const std::string& strategy,
                   std::uint64_t chunk,
                   Way way,
                   double share,
                   double p99_ratio) {
  BenchFigure made;
  made.bench = "interference";
  made.load = "decode";
  made.strategy = strategy;
  made.path = path;
  made.point = {"", chunk, 64, 1 << 20, 16, way, Locality::kRandom};
  made.gbps.add(50 * share);
  made.share = share;
  made.round_us = RoundTimes{100, 200, 100, 200 * p99_ratio, 0};
  made.p99_spread = Spread{p99_ratio - 0.01, p99_ratio + 0.02};
  return made;
}

BenchReport beside_decode() {
  BenchReport report;
  report.device = "a device";
  report.arena = "layer-first";
  for (const Way way : {Way::kToHost, Way::kToDevice}) {
    report.figures.push_back(
        beside(BenchPath::kBare, std::string(kOneCopy), 16384, way, 0.98, 1.02));
    report.figures.push_back(beside(BenchPath::kEngine, "auto", 16384, way, 0.81, 1.03));
    report.figures.push_back(beside(BenchPath::kEngine, "staged", 32768, way, 0.93, 1.08));
    report.figures.push_back(beside(BenchPath::kBare, "kernel", 16384, way, 0.5, 2.6));
  }
  return report;
}

/// Where the middle of the first circle of this style is; removes it.
std::pair<double, double> take_circle(std::string& svg, const std::string& style) {
  const std::string start = "<circle class=\"" + style + "\" cx=\"";
  const std::size_t at = svg.find(start);
  if (at == std::string::npos) return {-1, -1};
  const double x = std::stod(svg.substr(at + start.size()));
  const std::size_t second = svg.find("cy=\"", at) + 4;
  const double y = std::stod(svg.substr(second));
  svg.erase(at, start.size());
  return {x, y};
}

TEST(InterferencePlotTest, APanelOfEachLoadAndWayHasAMarkForEachFigureAtItsPlace) {
  BenchReport report = beside_decode();
  report.figures.push_back(report.figures.front());
  report.figures.back().load = "gemm";
  std::string svg = draw_bench(report);
  EXPECT_EQ(flaw_of(svg), "");
  EXPECT_THAT(svg, Not(HasSubstr("no transfer")));
  const auto panels = bench_plot_interference(report);
  ASSERT_EQ(panels.size(), 3U);
  EXPECT_EQ(panels[2].load, "gemm");
  for (const InterferencePanel& panel : panels) {
    EXPECT_THAT(svg, HasSubstr(std::string("copies ") + std::string(to_string(panel.way)) +
                               " beside " + panel.load));
    EXPECT_LE(panel.least_ratio, 1);
    EXPECT_GE(panel.most_share, 1);
    for (const BenchFigure* figure : panel.figures) {
      const double ratio = figure->round_us->p99_beside / figure->round_us->p99;
      const std::string style = figure->strategy == kOneCopy         ? "one-copy"
                                : figure->path == BenchPath::kEngine ? figure->strategy
                                                                     : "kernel hollow";
      const auto [x, y] = take_circle(svg, style);
      EXPECT_NEAR(x, panel.x(*figure->share), 0.01) << style;
      EXPECT_NEAR(y, panel.y(ratio), 0.01) << style;
      EXPECT_GE(y, panel.top);
      EXPECT_LE(y, panel.bottom);
      EXPECT_GE(panel.y(figure->p99_spread->high), panel.top);
      EXPECT_LE(panel.y(figure->p99_spread->low), panel.bottom);
    }
  }
  EXPECT_GT(panels[1].top, panels[0].bottom);
  EXPECT_THAT(svg, Not(HasSubstr("<circle class=\"auto\""))) << "more marks than figures";
}

TEST(InterferencePlotTest, MarksAreNamedByWhatDiffersAndNamesDoNotOverlap) {
  BenchReport report = beside_decode();
  report.figures.push_back(beside(BenchPath::kEngine, "auto", 16384, Way::kToHost, 0.81, 1.03));
  report.figures.back().point.locality = Locality::kSequential;
  report.figures.back().p99_spread.reset();
  const std::string svg = draw_bench(report);
  EXPECT_EQ(flaw_of(svg), "");
  const auto panels = bench_plot_interference(report);
  ASSERT_EQ(panels.size(), 2U);
  EXPECT_EQ(mark_name(panels[1], *panels[1].figures[0]), "bare one copy");
  EXPECT_EQ(mark_name(panels[1], *panels[1].figures[2]), "staged, 32.0 KiB");
  EXPECT_EQ(mark_name(panels[1], *panels[1].figures[3]), "bare kernel, 16.0 KiB");
  EXPECT_EQ(mark_name(panels[0], *panels[0].figures[1]), "auto, 16.0 KiB, random");
  EXPECT_EQ(mark_name(panels[0], *panels[0].figures[4]), "auto, 16.0 KiB, sequential");
  // They are at the same place.
  const auto base_of = [&svg](const std::string& name) {
    const std::size_t end = svg.find(">" + name + "<");
    if (end == std::string::npos) return -1.0;
    return std::stod(svg.substr(svg.rfind(" y=\"", end) + 4));
  };
  ASSERT_GT(base_of("auto, 16.0 KiB, random"), 0);
  ASSERT_GT(base_of("auto, 16.0 KiB, sequential"), 0);
  EXPECT_GE(std::abs(base_of("auto, 16.0 KiB, random") - base_of("auto, 16.0 KiB, sequential")),
            13);
}

TEST(InterferencePlotTest, StandsBelowTransfersAndSaysWhyItShowsNothing) {
  BenchReport both = sample();
  const std::size_t height_at = draw_bench(both).find("height=");
  const std::string before = draw_bench(both).substr(height_at, 16);
  for (const BenchFigure& figure : beside_decode().figures) both.figures.push_back(figure);
  EXPECT_EQ(flaw_of(draw_bench(both)), "");
  EXPECT_NE(draw_bench(both).substr(height_at, 16), before);
  const BenchPlotScale scale = bench_plot_scale(both);
  EXPECT_GT(bench_plot_interference(both).front().top, scale.y(1, 0));
  EXPECT_EQ(points_of(draw_bench(both), "staged").size(), 3U) << "transfers alone have curves";
  BenchReport apart = beside_decode();
  apart.ranks = 2;
  for (BenchFigure& figure : apart.figures) figure.share.reset();
  EXPECT_EQ(flaw_of(draw_bench(apart)), "");
  EXPECT_THAT(draw_bench(apart), HasSubstr("have no share of one link"));
}

}  // namespace
}  // namespace kvferry::cli
