// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/rl_samples.hpp"
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

using test::kMiB;
using test::sample_report;
using testing::HasSubstr;
using testing::Not;

using Points = std::vector<std::pair<double, double>>;

/// The points of the line with this style.
Points points_of(const std::string& svg, const std::string& style) {
  const std::string start = "class=\"line " + style + "\" points=\"";
  const std::size_t at = svg.find(start);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + start.size();
  std::istringstream text(svg.substr(begin, svg.find('"', begin) - begin));
  Points points;
  char comma = ' ';
  for (double x = 0, y = 0; text >> x >> comma >> y;) points.emplace_back(x, y);
  return points;
}

/// Elements are closed in their order, attributes are quoted, and no bare '<' or '&' stands in
/// text: what makes XML of this simple kind (no comments, no sections) well-formed.
std::string flaw_of(const std::string& xml) {
  std::vector<std::string> open;
  std::size_t at = 0;
  while (at < xml.size()) {
    if (xml[at] == '&') {
      const std::string entity = xml.substr(at, xml.find(';', at) - at + 1);
      if (entity != "&amp;" && entity != "&lt;" && entity != "&gt;" && entity != "&quot;") {
        return "bare &: " + xml.substr(at, 20);
      }
    }
    if (xml[at] != '<') {
      if (open.empty() && std::isspace(static_cast<unsigned char>(xml[at])) == 0)
        return "text outside";
      ++at;
      continue;
    }
    const std::size_t end = xml.find('>', at);
    if (end == std::string::npos) return "no >";
    const std::string tag = xml.substr(at + 1, end - at - 1);
    if (tag.find('<') != std::string::npos) return "< within " + tag;
    if (std::count(tag.begin(), tag.end(), '"') % 2 != 0) return "quotes of " + tag;
    const std::string name =
        tag.substr(tag[0] == '/' ? 1 : 0, tag.find_first_of(" /\n", 1) - (tag[0] == '/' ? 1 : 0));
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return "closes " + tag;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end + 1;
  }
  return open.empty() ? "" : "open: " + open.back();
}

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
