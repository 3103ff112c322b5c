// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/plot.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

constexpr double kLeastWidth = 800;
constexpr double kJobWidth = 64;
constexpr double kPanelHeight = 340;
constexpr double kCurvesHeight = 240;
constexpr int kGbpsTicks = 5;
/// Of title and note.
constexpr double kHeadBottom = 72;
/// Below what a panel draws, for its labels.
constexpr double kPanelFoot = 60;

/// One colour for a strategy, apart for the colour-blind; bare copies are dashed, and hollow.
constexpr std::string_view kLightCurves = R"(    .limit { stroke: #57606a; stroke-dasharray: 2 4; }
    .bare { stroke-dasharray: 7 4; }
    .auto { stroke: #000000; } .direct { stroke: #0072b2; } .staged { stroke: #009e73; }
    .strided { stroke: #7b4fb5; } .batch { stroke: #e69f00; } .memcpy { stroke: #d55e00; }
    .kernel { stroke: #cc79a7; } .agent { stroke: #8c564b; }
    circle.auto { fill: #000000; } circle.direct { fill: #0072b2; }
    circle.staged { fill: #009e73; } circle.strided { fill: #7b4fb5; } circle.batch { fill: #e69f00; }
    circle.memcpy { fill: #d55e00; } circle.kernel { fill: #cc79a7; }
    circle.agent { fill: #8c564b; }
    .one-copy { stroke: #57606a; }
    circle.one-copy { fill: #57606a; }
    circle.hollow { fill: #ffffff; }
)";
constexpr std::string_view kDarkCurves = R"(      .limit { stroke: #9198a1; }
      .auto { stroke: #ffffff; } .direct { stroke: #56b4e9; } .staged { stroke: #3fd0a0; }
      .strided { stroke: #b79cf0; } .batch { stroke: #f0c040; } .memcpy { stroke: #ff9e4a; }
      .kernel { stroke: #e0a0c8; } .agent { stroke: #d8a898; }
      circle.auto { fill: #ffffff; } circle.direct { fill: #56b4e9; }
      circle.staged { fill: #3fd0a0; } circle.strided { fill: #b79cf0; } circle.batch { fill: #f0c040; }
      circle.memcpy { fill: #ff9e4a; } circle.kernel { fill: #e0a0c8; }
      circle.agent { fill: #d8a898; }
      .one-copy { stroke: #9198a1; }
      circle.one-copy { fill: #9198a1; }
      circle.hollow { fill: #0d1117; }
)";

bool same_cache(const BenchPoint& a, const BenchPoint& b) {
  return std::tie(a.geometry, a.chunk_bytes, a.regions) ==
         std::tie(b.geometry, b.chunk_bytes, b.regions);
}

bool same_job(const BenchPoint& a, const BenchPoint& b) {
  return same_cache(a, b) && a.blocks == b.blocks && a.locality == b.locality;
}

/// The link is one device's, the curves are of all ranks.
bool shows_link(const BenchReport& report, Way way) {
  return report.ranks == 1 && !report.limit.of(way).empty();
}

/// What is drawn: transfers, along an axis of all kinds of jobs, cache by cache.
struct DrawnTransfers {
  std::vector<const BenchFigure*> figures;
  std::vector<BenchPoint> jobs;
  std::vector<Way> ways;
  std::vector<std::pair<BenchPath, std::string>> strategies;

  [[nodiscard]] std::size_t job_of(const BenchPoint& point) const {
    return static_cast<std::size_t>(
        std::find_if(jobs.begin(), jobs.end(),
                     [&point](const BenchPoint& job) { return same_job(job, point); }) -
        jobs.begin());
  }
};

DrawnTransfers transfers_of(const BenchReport& report) {
  DrawnTransfers drawn;
  for (const BenchFigure& figure : report.figures) {
    if (figure.bench != "transfer" || figure.gbps.empty()) continue;
    drawn.figures.push_back(&figure);
    if (drawn.job_of(figure.point) == drawn.jobs.size()) drawn.jobs.push_back(figure.point);
    if (std::find(drawn.ways.begin(), drawn.ways.end(), figure.point.way) == drawn.ways.end()) {
      drawn.ways.push_back(figure.point.way);
    }
    const std::pair strategy(figure.path, figure.strategy);
    if (std::find(drawn.strategies.begin(), drawn.strategies.end(), strategy) ==
        drawn.strategies.end()) {
      drawn.strategies.push_back(strategy);
    }
  }
  return drawn;
}

std::string curve_style(BenchPath path, std::string_view strategy) {
  return fmt::format("line {}{}", strategy, path == BenchPath::kBare ? " bare" : "");
}

void add_panel_axes(const DrawnTransfers& drawn,
                    const BenchPlotScale& scale,
                    std::size_t panel,
                    SvgDrawing& svg) {
  using Anchor = SvgDrawing::Anchor;
  for (int i = 0; i <= kGbpsTicks; ++i) {
    const double gbps = scale.most_gbps * i / kGbpsTicks;
    const double y = scale.y(panel, gbps);
    svg.line(i == 0 ? "axis" : "grid", {scale.left, y}, {scale.right, y});
    svg.text({scale.left - 8, y + 4}, fmt::format("{:.4g}", gbps), Anchor::kEnd);
  }
  const double zero = scale.y(panel, 0);
  const double top = scale.y(panel, scale.most_gbps);
  svg.line("axis", {scale.left, top}, {scale.left, zero});
  svg.upright_text({22, (top + zero) / 2}, fmt::format("{}, GB/s", to_string(drawn.ways[panel])));
  std::size_t first = 0;
  for (std::size_t job = 0; job < drawn.jobs.size(); ++job) {
    const BenchPoint& point = drawn.jobs[job];
    svg.line("axis", {scale.x(job), zero}, {scale.x(job), zero + 5});
    const bool sequential = point.locality == Locality::kSequential;
    svg.text({scale.x(job), zero + 20}, fmt::format("{}{}", point.blocks, sequential ? " seq" : ""),
             Anchor::kMiddle);
    const bool is_last = job + 1 == drawn.jobs.size() || !same_cache(point, drawn.jobs[job + 1]);
    if (!is_last) continue;
    svg.text({(scale.x(first) + scale.x(job)) / 2, zero + 40},
             point.geometry.empty()
                 ? fmt::format("{} x {}", ipc::format_size(point.chunk_bytes), point.regions)
                 : point.geometry,
             Anchor::kMiddle);
    first = job + 1;
  }
}

/// Its points of one locality, cache by cache: a line between two caches would say nothing.
void add_curve(const DrawnTransfers& drawn,
               const std::pair<BenchPath, std::string>& strategy,
               Locality locality,
               const BenchPlotScale& scale,
               std::size_t panel,
               SvgDrawing& svg) {
  std::vector<std::pair<std::size_t, SvgDrawing::Point>> points;
  for (const BenchFigure* figure : drawn.figures) {
    const BenchPoint& point = figure->point;
    if (point.way != drawn.ways[panel] || point.locality != locality ||
        figure->path != strategy.first || figure->strategy != strategy.second) {
      continue;
    }
    const std::size_t job = drawn.job_of(point);
    points.push_back({job, {scale.x(job), scale.y(panel, figure->gbps.median())}});
  }
  std::sort(points.begin(), points.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  const std::string dot = strategy.second + (strategy.first == BenchPath::kBare ? " hollow" : "");
  std::vector<SvgDrawing::Point> line;
  for (std::size_t i = 0; i < points.size(); ++i) {
    svg.circle(dot, points[i].second, 2.5);
    line.push_back(points[i].second);
    const bool goes_on = i + 1 < points.size() &&
                         same_cache(drawn.jobs[points[i].first], drawn.jobs[points[i + 1].first]);
    if (goes_on) continue;
    if (line.size() > 1) svg.polyline(curve_style(strategy.first, strategy.second), line);
    line.clear();
  }
}

void add_curves_legend(const DrawnTransfers& drawn,
                       bool with_link,
                       const BenchPlotScale& scale,
                       SvgDrawing& svg) {
  std::vector<std::pair<std::string, std::string>> entries;
  if (with_link) entries.emplace_back("line limit", "the link");
  for (const auto& [path, strategy] : drawn.strategies) {
    entries.emplace_back(curve_style(path, strategy),
                         fmt::format("{}{}", path == BenchPath::kBare ? "bare " : "", strategy));
  }
  double x = scale.left;
  double y = 76;
  for (const auto& [style, name] : entries) {
    const double width = 56 + 7.5 * static_cast<double>(name.size());
    if (x + width > scale.right) {
      x = scale.left;
      y += 20;
    }
    svg.line(style, {x, y}, {x + 28, y});
    svg.text({x + 34, y + 4}, name);
    x += width;
  }
}

void draw_transfers(const BenchReport& report,
                    const DrawnTransfers& drawn,
                    const BenchPlotScale& scale,
                    SvgDrawing& svg) {
  add_curves_legend(drawn, shows_link(report, drawn.ways.front()), scale, svg);
  for (std::size_t panel = 0; panel < drawn.ways.size(); ++panel) {
    add_panel_axes(drawn, scale, panel, svg);
    if (shows_link(report, drawn.ways[panel])) {
      const double y = scale.y(panel, report.limit.of(drawn.ways[panel]).median());
      svg.line("line limit", {scale.left, y}, {scale.right, y});
    }
    for (const auto& strategy : drawn.strategies) {
      for (const Locality locality : {Locality::kSequential, Locality::kRandom}) {
        add_curve(drawn, strategy, locality, scale, panel, svg);
      }
    }
  }
}

}  // namespace

double BenchPlotScale::x(std::size_t job) const {
  return left + (right - left) * (static_cast<double>(job) + 0.5) / static_cast<double>(jobs);
}

double BenchPlotScale::y(std::size_t panel, double gbps) const {
  return first_top + static_cast<double>(panel) * panel_height + curves_height -
         curves_height * gbps / most_gbps;
}

BenchPlotScale bench_plot_scale(const BenchReport& report) {
  const DrawnTransfers drawn = transfers_of(report);
  BenchPlotScale scale;
  scale.jobs = std::max<std::size_t>(1, drawn.jobs.size());
  scale.left = 84;
  scale.right =
      std::max(kLeastWidth - 24, scale.left + kJobWidth * static_cast<double>(scale.jobs));
  scale.first_top = 128;
  scale.panel_height = kPanelHeight;
  scale.curves_height = kCurvesHeight;
  double most = 1;
  for (const BenchFigure* figure : drawn.figures) most = std::max(most, figure->gbps.median());
  for (const Way way : drawn.ways) {
    if (shows_link(report, way)) most = std::max(most, report.limit.of(way).median());
  }
  scale.most_gbps = round_step(most * 1.02 / kGbpsTicks) * kGbpsTicks;
  return scale;
}

std::vector<InterferencePanel> bench_plot_interference(const BenchReport& report) {
  const BenchPlotScale scale = bench_plot_scale(report);
  const DrawnTransfers drawn = transfers_of(report);
  const double top = drawn.figures.empty()
                         ? kHeadBottom
                         : scale.first_top + static_cast<double>(drawn.ways.size()) * kPanelHeight;
  return interference_panels(report, scale.left, scale.right, top);
}

std::string draw_bench(const BenchReport& report) {
  constexpr std::string_view kTitle = "Blocks between device and host";
  const DrawnTransfers drawn = transfers_of(report);
  const BenchPlotScale scale = bench_plot_scale(report);
  const std::vector<InterferencePanel> beside = bench_plot_interference(report);
  const double bottom =
      beside.empty()
          ? scale.first_top +
                static_cast<double>(std::max<std::size_t>(1, drawn.ways.size())) * kPanelHeight
          : beside.back().bottom + kPanelFoot;
  SvgDrawing svg({scale.right + 24, bottom}, kTitle, kLightCurves, kDarkCurves);
  svg.styled_text("title", {scale.left, 30}, kTitle);
  svg.styled_text("note", {scale.left, 52},
                  fmt::format("{}; {} rank{}, {} arena{}", report.device, report.ranks,
                              report.ranks == 1 ? "" : "s", report.arena,
                              drawn.figures.empty() ? "" : "; by blocks of a job, cache by cache"));
  if (drawn.figures.empty() && beside.empty()) {
    const bool measured =
        std::any_of(report.figures.begin(), report.figures.end(),
                    [](const BenchFigure& figure) { return !figure.load.empty(); });
    svg.text({(scale.left + scale.right) / 2, scale.y(0, scale.most_gbps / 2)},
             measured ? "copies of ranks on several devices have no share of one link"
                      : "no transfer and no interference was measured",
             SvgDrawing::Anchor::kMiddle);
    return std::move(svg).finish();
  }
  if (!drawn.figures.empty()) draw_transfers(report, drawn, scale, svg);
  for (const InterferencePanel& panel : beside) draw_panel(panel, svg);
  return std::move(svg).finish();
}

}  // namespace kvferry::cli
