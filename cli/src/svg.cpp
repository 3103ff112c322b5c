// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "svg.hpp"

#include <fmt/format.h>

#include <cmath>

namespace kvferry::cli {
namespace {

constexpr std::string_view kLight = R"(  <style>
    .paper { fill: #ffffff; }
    text { fill: #24292f; font-family: sans-serif; font-size: 13px; }
    .title { font-size: 17px; font-weight: 600; }
    .note { fill: #57606a; }
    .axis { stroke: #57606a; stroke-width: 1; }
    .grid { stroke: #d0d7de; stroke-width: 1; }
    .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
    circle { stroke-width: 1.5; }
)";
constexpr std::string_view kDark = R"(    @media (prefers-color-scheme: dark) {
      .paper { fill: #0d1117; } text { fill: #e6edf3; } .note { fill: #9198a1; }
      .axis { stroke: #9198a1; } .grid { stroke: #30363d; }
)";

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

}  // namespace

double round_step(double step) {
  const double power = std::pow(10.0, std::floor(std::log10(step)));
  for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (factor * power >= step * (1 - 1e-9)) return factor * power;
  }
  return 10.0 * power;
}

SvgDrawing::SvgDrawing(Point size,
                       std::string_view title,
                       std::string_view light,
                       std::string_view dark)
    : svg_(fmt::format(
          R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img">)"
          "\n",
          size.x,
          size.y)) {
  svg_ += fmt::format("{}{}{}{}    }}\n  </style>\n", kLight, light, kDark, dark);
  svg_ += fmt::format("  <title>{}</title>\n", escaped(title));
  svg_ += fmt::format(R"(  <rect class="paper" width="{}" height="{}"/>)"
                      "\n",
                      size.x, size.y);
}

void SvgDrawing::line(std::string_view style, Point from, Point to) {
  svg_ += fmt::format(R"(  <line class="{}" x1="{:.2f}" y1="{:.2f}" x2="{:.2f}" y2="{:.2f}"/>)"
                      "\n",
                      style, from.x, from.y, to.x, to.y);
}

void SvgDrawing::polyline(std::string_view style, std::span<const Point> points) {
  svg_ += fmt::format(R"(  <polyline class="{}" points=")", style);
  for (std::size_t i = 0; i < points.size(); ++i) {
    svg_ += fmt::format("{}{:.2f},{:.2f}", i == 0 ? "" : " ", points[i].x, points[i].y);
  }
  svg_ += "\"/>\n";
}

void SvgDrawing::circle(std::string_view style, Point center, double radius) {
  svg_ += fmt::format(R"(  <circle class="{}" cx="{:.2f}" cy="{:.2f}" r="{}"/>)"
                      "\n",
                      style, center.x, center.y, radius);
}

void SvgDrawing::text(Point at, std::string_view text, Anchor anchor) {
  const std::string_view how = anchor == Anchor::kStart    ? ""
                               : anchor == Anchor::kMiddle ? R"( text-anchor="middle")"
                                                           : R"( text-anchor="end")";
  svg_ += fmt::format(R"(  <text x="{:.2f}" y="{:.2f}"{}>{}</text>)"
                      "\n",
                      at.x, at.y, how, escaped(text));
}

void SvgDrawing::styled_text(std::string_view style, Point at, std::string_view text) {
  svg_ += fmt::format(R"(  <text class="{}" x="{}" y="{}">{}</text>)"
                      "\n",
                      style, at.x, at.y, escaped(text));
}

void SvgDrawing::upright_text(Point middle, std::string_view text) {
  svg_ += fmt::format(
      R"svg(  <text x="{0}" y="{1:.2f}" text-anchor="middle" transform="rotate(-90 {0} {1:.2f})">{2}</text>)svg"
      "\n",
      middle.x, middle.y, escaped(text));
}

std::string SvgDrawing::finish() && { return std::move(svg_) + "</svg>\n"; }

}  // namespace kvferry::cli
