// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/plot.hpp"

#include "svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

constexpr double kWidth = 960;
constexpr double kHeight = 480;
constexpr int kYTicks = 5;
constexpr int kXTicks = 10;
constexpr double kMiB = 1024.0 * 1024.0;
constexpr double kGiB = 1024.0 * kMiB;

/// Colours that stay apart for the colour-blind, on white and on near-black.
constexpr std::string_view kLightSeries =
    R"(    .before { stroke: #d55e00; } .after { stroke: #0072b2; }
    .used { stroke: #009e73; stroke-dasharray: 5 4; }
    circle.before { fill: #d55e00; } circle.after { fill: #0072b2; } circle.used { fill: #009e73; }
)";
constexpr std::string_view kDarkSeries =
    R"(      .before { stroke: #ff9e4a; } .after { stroke: #56b4e9; } .used { stroke: #3fd0a0; }
      circle.before { fill: #ff9e4a; } circle.after { fill: #56b4e9; }
      circle.used { fill: #3fd0a0; }
)";

struct Series {
  std::string_view name;
  std::string_view style;
  std::uint64_t (*value)(const RankReserve&);
};
constexpr std::array kSeries = {
    Series{"reserved before continue", "before",
           [](const RankReserve& all) { return all.reserved_before; }},
    Series{"reserved after", "after", [](const RankReserve& all) { return all.reserved_after; }},
    Series{"used after", "used", [](const RankReserve& all) { return all.used_after; }}};

std::vector<const IterationRecord*> shown_of(const RlReport& report) {
  std::vector<const IterationRecord*> shown;
  for (const IterationRecord& iteration : report.iterations) {
    if (iteration.finished) shown.push_back(&iteration);
  }
  return shown;
}

double unit_of(double most_bytes) { return most_bytes >= 4 * kGiB ? kGiB : kMiB; }

void add_axes(const PlotScale& scale, SvgDrawing& svg) {
  using Anchor = SvgDrawing::Anchor;
  const double unit = unit_of(scale.most_bytes);
  for (int i = 0; i <= kYTicks; ++i) {
    const double y = scale.bottom - (scale.bottom - scale.top) * i / kYTicks;
    svg.line(i == 0 ? "axis" : "grid", {scale.left, y}, {scale.right, y});
    svg.text({scale.left - 8, y + 4}, fmt::format("{:.4g}", scale.most_bytes / unit * i / kYTicks),
             Anchor::kEnd);
  }
  const auto step = static_cast<std::uint32_t>(
      std::max(1.0, std::ceil(round_step(static_cast<double>(scale.iterations) / kXTicks))));
  for (std::uint32_t at = step; at <= scale.iterations; at += step) {
    svg.line("axis", {scale.x(at), scale.bottom}, {scale.x(at), scale.bottom + 5});
    svg.text({scale.x(at), scale.bottom + 20}, std::to_string(at), Anchor::kMiddle);
  }
  svg.line("axis", {scale.left, scale.top}, {scale.left, scale.bottom});
  svg.text({(scale.left + scale.right) / 2, scale.bottom + 44}, "iteration", Anchor::kMiddle);
  svg.upright_text({22, (scale.top + scale.bottom) / 2},
                   fmt::format("device memory ({})", unit == kGiB ? "GiB" : "MiB"));
}

void add_legend(const PlotScale& scale, SvgDrawing& svg) {
  double x = scale.left;
  for (const Series& series : kSeries) {
    const double y = scale.top - 18;
    svg.line(fmt::format("line {}", series.style), {x, y}, {x + 28, y});
    svg.text({x + 34, y + 4}, series.name);
    x += 60 + 7.5 * static_cast<double>(series.name.size());
  }
}

void add_series(const Series& series,
                const std::vector<const IterationRecord*>& shown,
                const PlotScale& scale,
                SvgDrawing& svg) {
  std::vector<SvgDrawing::Point> points;
  points.reserve(shown.size());
  for (const IterationRecord* iteration : shown) {
    points.push_back({scale.x(iteration->number), scale.y(series.value(iteration->total()))});
  }
  if (points.size() == 1) {  // A line of one point shows nothing.
    svg.circle(series.style, points.front(), 4);
  } else {
    svg.polyline(fmt::format("line {}", series.style), points);
  }
}

}  // namespace

double PlotScale::x(std::uint32_t iteration) const {
  if (iterations <= 1) return (left + right) / 2;
  return left + (right - left) * (iteration - 1.0) / (iterations - 1.0);
}

double PlotScale::y(std::uint64_t bytes) const {
  return bottom - (bottom - top) * static_cast<double>(bytes) / most_bytes;
}

PlotScale plot_scale(const RlReport& report) {
  PlotScale scale{84, kWidth - 24, 104, kHeight - 60};
  std::uint64_t most = 0;
  for (const IterationRecord* iteration : shown_of(report)) {
    const RankReserve total = iteration->total();
    scale.iterations = std::max(scale.iterations, iteration->number);
    most = std::max({most, total.reserved_before, total.reserved_after, total.used_after});
  }
  const double unit = unit_of(static_cast<double>(most));
  const double least = std::max(1.0, static_cast<double>(most) / unit);
  scale.most_bytes = round_step(least * 1.05 / kYTicks) * kYTicks * unit;
  return scale;
}

std::string draw_plot(const RlReport& report) {
  constexpr std::string_view kTitle = "Device memory of the workers' allocators over an RL loop";
  const PlotScale scale = plot_scale(report);
  const std::vector<const IterationRecord*> shown = shown_of(report);
  SvgDrawing svg({kWidth, kHeight}, kTitle, kLightSeries, kDarkSeries);
  svg.styled_text("title", {scale.left, 30}, kTitle);
  svg.styled_text("note", {scale.left, 54},
                  fmt::format("{}; all ranks together", describe(report.settings)));
  add_axes(scale, svg);
  add_legend(scale, svg);
  if (shown.empty()) {
    svg.text({(scale.left + scale.right) / 2, (scale.top + scale.bottom) / 2},
             "no iteration was done", SvgDrawing::Anchor::kMiddle);
  } else {
    for (const Series& series : kSeries) add_series(series, shown, scale, svg);
  }
  return std::move(svg).finish();
}

}  // namespace kvferry::cli
