// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rl/plot.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>
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
constexpr std::string_view kStyle = R"(  <style>
    .paper { fill: #ffffff; }
    text { fill: #24292f; font-family: sans-serif; font-size: 13px; }
    .title { font-size: 17px; font-weight: 600; }
    .note { fill: #57606a; }
    .axis { stroke: #57606a; stroke-width: 1; }
    .grid { stroke: #d0d7de; stroke-width: 1; }
    .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
    .before { stroke: #d55e00; } .after { stroke: #0072b2; }
    .used { stroke: #009e73; stroke-dasharray: 5 4; }
    circle { stroke: none; }
    circle.before { fill: #d55e00; } circle.after { fill: #0072b2; } circle.used { fill: #009e73; }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #0d1117; } text { fill: #e6edf3; } .note { fill: #9198a1; }
      .axis { stroke: #9198a1; } .grid { stroke: #30363d; }
      .before { stroke: #ff9e4a; } .after { stroke: #56b4e9; } .used { stroke: #3fd0a0; }
      circle.before { fill: #ff9e4a; } circle.after { fill: #56b4e9; }
      circle.used { fill: #3fd0a0; }
    }
  </style>
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

std::string escaped(std::string_view text) {
  std::string out;
  for (const char letter : text) {
    switch (letter) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      // Not allowed in XML, whatever a file name may hold.
      default: out += static_cast<unsigned char>(letter) < 0x20 ? ' ' : letter;
    }
  }
  return out;
}

/// The next of 1, 2, 2.5, 5 times a power of ten.
double round_step(double step) {
  const double power = std::pow(10.0, std::floor(std::log10(step)));
  for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (factor * power >= step * (1 - 1e-9)) return factor * power;
  }
  return 10.0 * power;
}

double unit_of(double most_bytes) { return most_bytes >= 4 * kGiB ? kGiB : kMiB; }

void add_axes(const PlotScale& scale, std::string& svg) {
  const double unit = unit_of(scale.most_bytes);
  for (int i = 0; i <= kYTicks; ++i) {
    const double value = scale.most_bytes / unit * i / kYTicks;
    const double y = scale.bottom - (scale.bottom - scale.top) * i / kYTicks;
    svg += fmt::format(R"(  <line class="{}" x1="{:.2f}" y1="{:.2f}" x2="{:.2f}" y2="{:.2f}"/>)"
                       "\n",
                       i == 0 ? "axis" : "grid", scale.left, y, scale.right, y);
    svg += fmt::format(R"(  <text x="{:.2f}" y="{:.2f}" text-anchor="end">{:.4g}</text>)"
                       "\n",
                       scale.left - 8, y + 4, value);
  }
  const auto step = static_cast<std::uint32_t>(
      std::max(1.0, std::ceil(round_step(static_cast<double>(scale.iterations) / kXTicks))));
  for (std::uint32_t at = step; at <= scale.iterations; at += step) {
    svg +=
        fmt::format(R"(  <line class="axis" x1="{0:.2f}" y1="{1:.2f}" x2="{0:.2f}" y2="{2:.2f}"/>)"
                    "\n",
                    scale.x(at), scale.bottom, scale.bottom + 5);
    svg += fmt::format(R"(  <text x="{:.2f}" y="{:.2f}" text-anchor="middle">{}</text>)"
                       "\n",
                       scale.x(at), scale.bottom + 20, at);
  }
  svg += fmt::format(R"(  <line class="axis" x1="{0:.2f}" y1="{1:.2f}" x2="{0:.2f}" y2="{2:.2f}"/>)"
                     "\n",
                     scale.left, scale.top, scale.bottom);
  svg += fmt::format(R"(  <text x="{:.2f}" y="{:.2f}" text-anchor="middle">iteration</text>)"
                     "\n",
                     (scale.left + scale.right) / 2, scale.bottom + 44);
  svg += fmt::format(
      R"svg(  <text x="22" y="{0:.2f}" text-anchor="middle" transform="rotate(-90 22 {0:.2f})">)svg"
      "device memory ({1})</text>\n",
      (scale.top + scale.bottom) / 2, unit == kGiB ? "GiB" : "MiB");
}

void add_legend(const PlotScale& scale, std::string& svg) {
  double x = scale.left;
  for (const Series& series : kSeries) {
    const double y = scale.top - 18;
    svg +=
        fmt::format(R"(  <line class="line {}" x1="{:.2f}" y1="{:.2f}" x2="{:.2f}" y2="{:.2f}"/>)"
                    "\n",
                    series.style, x, y, x + 28, y);
    svg += fmt::format(R"(  <text x="{:.2f}" y="{:.2f}">{}</text>)"
                       "\n",
                       x + 34, y + 4, series.name);
    x += 60 + 7.5 * static_cast<double>(series.name.size());
  }
}

void add_series(const Series& series,
                const std::vector<const IterationRecord*>& shown,
                const PlotScale& scale,
                std::string& svg) {
  if (shown.size() == 1) {  // A line of one point shows nothing.
    svg += fmt::format(R"(  <circle class="{}" cx="{:.2f}" cy="{:.2f}" r="4"/>)"
                       "\n",
                       series.style, scale.x(shown.front()->number),
                       scale.y(series.value(shown.front()->total())));
    return;
  }
  svg += fmt::format(R"(  <polyline class="line {}" points=")", series.style);
  for (const IterationRecord* iteration : shown) {
    svg += fmt::format("{}{:.2f},{:.2f}", iteration == shown.front() ? "" : " ",
                       scale.x(iteration->number), scale.y(series.value(iteration->total())));
  }
  svg += "\"/>\n";
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
  const PlotScale scale = plot_scale(report);
  const std::vector<const IterationRecord*> shown = shown_of(report);
  std::string svg = fmt::format(
      R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img">)"
      "\n",
      kWidth, kHeight);
  svg += kStyle;
  svg += "  <title>Device memory of the workers' allocators over an RL loop</title>\n";
  svg += fmt::format(R"(  <rect class="paper" width="{}" height="{}"/>)"
                     "\n",
                     kWidth, kHeight);
  svg += fmt::format(R"(  <text class="title" x="{}" y="30">{}</text>)"
                     "\n",
                     scale.left, "Device memory of the workers' allocators over an RL loop");
  svg += fmt::format(R"(  <text class="note" x="{}" y="54">{}</text>)"
                     "\n",
                     scale.left,
                     escaped(fmt::format("{}; all ranks together", describe(report.settings))));
  add_axes(scale, svg);
  add_legend(scale, svg);
  if (shown.empty()) {
    svg += fmt::format(
        R"(  <text x="{:.2f}" y="{:.2f}" text-anchor="middle">no iteration was done</text>)"
        "\n",
        (scale.left + scale.right) / 2, (scale.top + scale.bottom) / 2);
  } else {
    for (const Series& series : kSeries) add_series(series, shown, scale, svg);
  }
  return svg + "</svg>\n";
}

}  // namespace kvferry::cli
