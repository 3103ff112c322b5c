// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "simulate/report.hpp"
#include "svg.hpp"
#include "table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace kvferry::cli {
namespace {

constexpr double kPlotWidth = 860;
constexpr double kPlotHeight = 470;
constexpr double kLeft = 70;
constexpr double kRight = kPlotWidth - 30;
constexpr double kTop = 92;
constexpr double kBottom = kPlotHeight - 56;
constexpr int kTicks = 5;

/// Colours that stay apart for the colour-blind, on white and on near-black.
constexpr std::string_view kLightPolicies =
    R"(    .reuse { stroke: #000000; stroke-width: 3; } .optimal { stroke: #57606a; stroke-dasharray: 2 4; }
    .lru { stroke: #0072b2; } .arc { stroke: #009e73; } .s3fifo { stroke: #e69f00; }
    .sieve { stroke: #d55e00; } .lfu { stroke: #cc79a7; }
    circle.reuse { fill: #000000; } circle.optimal { fill: #57606a; } circle.lru { fill: #0072b2; }
    circle.arc { fill: #009e73; } circle.s3fifo { fill: #e69f00; } circle.sieve { fill: #d55e00; }
    circle.lfu { fill: #cc79a7; }
)";
constexpr std::string_view kDarkPolicies =
    R"(      .reuse { stroke: #ffffff; } .optimal { stroke: #9198a1; }
      .lru { stroke: #56b4e9; } .arc { stroke: #3fd0a0; } .s3fifo { stroke: #f0c040; }
      .sieve { stroke: #ff9e4a; } .lfu { stroke: #e0a0c8; }
      circle.reuse { fill: #ffffff; } circle.optimal { fill: #9198a1; } circle.lru { fill: #56b4e9; }
      circle.arc { fill: #3fd0a0; } circle.s3fifo { fill: #f0c040; } circle.sieve { fill: #ff9e4a; }
      circle.lfu { fill: #e0a0c8; }
)";

/// Capacities by their logarithm, hit rates from zero.
struct Scale {
  double least = 1;
  double most = 2;
  double top_rate = 1;

  explicit Scale(const SimulationReport& report) {
    double best = report.unlimited_hit_rate;
    for (const SimulatedCache& result : report.results) {
      const auto capacity = static_cast<double>(result.capacity);
      least = &result == &report.results.front() ? capacity : std::min(least, capacity);
      most = &result == &report.results.front() ? capacity : std::max(most, capacity);
      best = std::max(best, result.hit_rate());
    }
    top_rate = kTicks * round_step(std::max(best, 0.01) / kTicks);
  }
  [[nodiscard]] double x(double capacity) const {
    if (most <= least) return (kLeft + kRight) / 2;
    return kLeft + (kRight - kLeft) * std::log(capacity / least) / std::log(most / least);
  }
  [[nodiscard]] double y(double hit_rate) const {
    return kBottom - (kBottom - kTop) * hit_rate / top_rate;
  }
};

void add_axes(const SimulationReport& report, const Scale& scale, SvgDrawing& svg) {
  using Anchor = SvgDrawing::Anchor;
  for (int i = 0; i <= kTicks; ++i) {
    const double rate = scale.top_rate * i / kTicks;
    svg.line(i == 0 ? "axis" : "grid", {kLeft, scale.y(rate)}, {kRight, scale.y(rate)});
    svg.text({kLeft - 8, scale.y(rate) + 4}, fmt::format("{:.4g}", rate), Anchor::kEnd);
  }
  svg.line("axis", {kLeft, kTop}, {kLeft, kBottom});
  svg.upright_text({20, (kTop + kBottom) / 2}, "hit rate");
  double free_from = 0;  // Labels do not overlap.
  std::vector<std::size_t> capacities;
  for (const SimulatedCache& result : report.results) capacities.push_back(result.capacity);
  std::sort(capacities.begin(), capacities.end());
  capacities.erase(std::unique(capacities.begin(), capacities.end()), capacities.end());
  for (const std::size_t capacity : capacities) {
    const double x = scale.x(static_cast<double>(capacity));
    svg.line("axis", {x, kBottom}, {x, kBottom + 5});
    if (x < free_from) continue;
    svg.text({x, kBottom + 20}, with_separators(capacity), Anchor::kMiddle);
    free_from = x + 66;
  }
  svg.text({(kLeft + kRight) / 2, kPlotHeight - 14}, "capacity, blocks", Anchor::kMiddle);
}

}  // namespace

std::string draw_simulation(const SimulationReport& report) {
  SvgDrawing svg({kPlotWidth, kPlotHeight}, "Hits of a cache of prefixes", kLightPolicies,
                 kDarkPolicies);
  svg.styled_text(
      "note", {kLeft, 52},
      fmt::format("{}: {} requests, {} blocks, {} distinct; unlimited {:.4f}", report.workload,
                  with_separators(report.requests), with_separators(report.references),
                  with_separators(report.distinct), report.unlimited_hit_rate));
  const Scale scale(report);
  add_axes(report, scale, svg);
  std::vector<std::string> policies;
  std::map<std::string, std::vector<SvgDrawing::Point>> curves;
  for (const SimulatedCache& result : report.results) {
    if (!curves.contains(result.policy)) policies.push_back(result.policy);
    curves[result.policy].push_back(
        {scale.x(static_cast<double>(result.capacity)), scale.y(result.hit_rate())});
  }
  double x = kLeft;
  for (const std::string& policy : policies) {
    std::vector<SvgDrawing::Point>& points = curves[policy];
    std::sort(points.begin(), points.end(), [](const auto& a, const auto& b) { return a.x < b.x; });
    if (points.size() > 1) svg.polyline("line " + policy, points);
    for (const SvgDrawing::Point& point : points) svg.circle(policy, point, 3);
    svg.line("line " + policy, {x, 74}, {x + 24, 74});
    svg.text({x + 30, 78}, policy);
    x += 48 + 9.0 * static_cast<double>(policy.size());
  }
  return std::move(svg).finish();
}

}  // namespace kvferry::cli
