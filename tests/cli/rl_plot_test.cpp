// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/rl_samples.hpp"
#include "cli/svg_checks.hpp"
#include "rl/plot.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

using test::flaw_of;
using test::kMiB;
using test::Points;
using test::points_of;
using test::sample_report;
using testing::HasSubstr;
using testing::Not;

TEST(PlotTest, IsWellFormedWhateverItShows) {
  EXPECT_NE(flaw_of("<svg><text>a & b</text></svg>"), "");
  EXPECT_NE(flaw_of("<svg><text></svg></text>"), "");
  for (const std::uint32_t iterations : {0U, 1U, 2U, 7U, 1000U}) {
    RlReport report = sample_report(iterations);
    report.settings.geometry = "a<b>&\"c\".toml\n";
    const std::string svg = draw_plot(report);
    EXPECT_EQ(flaw_of(svg), "") << iterations;
    EXPECT_THAT(svg, HasSubstr("a&lt;b&gt;&amp;&quot;c&quot;.toml "));
  }
}

TEST(PlotTest, EveryValueStandsAtItsPlace) {
  RlReport report = sample_report(12);
  report.iterations[4].ranks[0].reserved_before = 90 * kMiB;
  const PlotScale scale = plot_scale(report);
  const std::string svg = draw_plot(report);
  const Points before = points_of(svg, "before");
  const Points after = points_of(svg, "after");
  const Points used = points_of(svg, "used");
  ASSERT_EQ(before.size(), 12U);
  ASSERT_EQ(after.size(), 12U);
  ASSERT_EQ(used.size(), 12U);
  for (std::size_t i = 0; i < before.size(); ++i) {
    const RankReserve total = report.iterations[i].total();
    EXPECT_NEAR(before[i].first, scale.x(report.iterations[i].number), 0.01);
    EXPECT_NEAR(before[i].second, scale.y(total.reserved_before), 0.01);
    EXPECT_NEAR(after[i].second, scale.y(total.reserved_after), 0.01);
    EXPECT_NEAR(used[i].second, scale.y(total.used_after), 0.01);
  }
  const auto highest =
      std::min_element(before.begin(), before.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  EXPECT_EQ(highest - before.begin(), 4);
  EXPECT_DOUBLE_EQ(before.front().first, scale.left);
  EXPECT_DOUBLE_EQ(before.back().first, scale.right);
}

TEST(PlotTest, TheScaleHoldsEverythingAndWastesLittle) {
  for (const std::uint64_t mib : {1ULL, 37ULL, 100ULL, 999ULL, 5'000ULL, 123'456ULL}) {
    RlReport report = sample_report(4);
    report.iterations[2].ranks[0].reserved_before = mib * kMiB;
    const PlotScale scale = plot_scale(report);
    const double most = static_cast<double>(high_water_bytes(report));
    EXPECT_GE(scale.most_bytes, most);
    EXPECT_LE(scale.most_bytes, 2.7 * most);
    EXPECT_GT(scale.y(high_water_bytes(report)), scale.top);
    EXPECT_DOUBLE_EQ(scale.y(0), scale.bottom);
  }
}

TEST(PlotTest, NamesAxesUnitsSettingsAndLines) {
  RlReport report = sample_report(6);
  std::string svg = draw_plot(report);
  for (const char* text :
       {"iteration", "device memory (MiB)", "retract, update from disk", "2 ranks of tiny on host",
        "reserved before continue", "reserved after", "used after", "prefers-color-scheme: dark"}) {
    EXPECT_THAT(svg, HasSubstr(text));
  }
  report.iterations[0].ranks[0].reserved_before = 9'000 * kMiB;
  svg = draw_plot(report);
  EXPECT_THAT(svg, HasSubstr("device memory (GiB)"));
}

TEST(PlotTest, IterationsThatWereNotDoneAreLeftOut) {
  RlReport report = sample_report(6);
  report.iterations.back().finished = false;
  report.iterations.back().ranks.clear();
  EXPECT_EQ(points_of(draw_plot(report), "before").size(), 5U);
  report = sample_report(1);
  EXPECT_THAT(draw_plot(report), HasSubstr("<circle class=\"after\""));
  report.iterations.clear();
  EXPECT_THAT(draw_plot(report), HasSubstr("no iteration was done"));
  EXPECT_THAT(draw_plot(report), Not(HasSubstr("nan")));
}

}  // namespace
}  // namespace kvferry::cli
