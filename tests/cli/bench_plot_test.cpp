// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/plot.hpp"
#include "cli/svg_checks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

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
  EXPECT_THAT(draw_bench(none), HasSubstr("no transfer was measured"));
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

}  // namespace
}  // namespace kvferry::cli
