// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/interference_plot.hpp"

#include "kvferry/ipc/base/size.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvferry::cli {
namespace {

constexpr double kHeadHeight = 34;
constexpr double kMarksHeight = 270;
constexpr int kPanelTicks = 5;
/// Of a letter and of a line of labels.
constexpr double kLetterWidth = 7;
constexpr double kLineHeight = 15;
constexpr double kMarkRadius = 4;

double ratio_of(const BenchFigure& figure) {
  return figure.round_us->p99_beside / figure.round_us->p99;
}

std::string cache_of(const BenchPoint& point) {
  return point.geometry.empty() ? ipc::format_size(point.chunk_bytes) : point.geometry;
}

std::string mark_style(const BenchFigure& figure) {
  if (figure.strategy == kOneCopy) return "one-copy";
  return figure.strategy + (figure.path == BenchPath::kEngine ? "" : " hollow");
}

/// The first panel of its load and way, or a new one.
InterferencePanel& panel_for(const BenchFigure& figure, std::vector<InterferencePanel>& panels) {
  const auto found = std::find_if(panels.begin(), panels.end(), [&](const auto& panel) {
    return panel.load == figure.load && panel.way == figure.point.way;
  });
  if (found != panels.end()) return *found;
  InterferencePanel panel;
  panel.load = figure.load;
  panel.way = figure.point.way;
  return panels.emplace_back(std::move(panel));
}

/// So that all marks with their spreads, an idle link's 100 % and a ratio of 1 are in it.
void set_scale(InterferencePanel& panel) {
  double share = 1;
  double least = 1;
  double most = 1.01;
  for (const BenchFigure* figure : panel.figures) {
    const double ratio = ratio_of(*figure);
    const Spread spread = figure->p99_spread.value_or(Spread{ratio, ratio});
    share = std::max(share, *figure->share);
    least = std::min({least, ratio, spread.low});
    most = std::max({most, ratio, spread.high});
  }
  panel.most_share = round_step(share / kPanelTicks) * kPanelTicks;
  // The step grows with what is below 1: the ends have to be steps, too.
  double step = round_step((most - least) / kPanelTicks);
  panel.least_ratio = std::floor(least / step + 1e-9) * step;
  while (panel.least_ratio + kPanelTicks * step < most) {
    step = round_step(step * 1.01);
    panel.least_ratio = std::floor(least / step + 1e-9) * step;
  }
  panel.most_ratio = panel.least_ratio + kPanelTicks * step;
}

void add_panel_frame(const InterferencePanel& panel, SvgDrawing& svg) {
  using Anchor = SvgDrawing::Anchor;
  svg.styled_text(
      "note", {panel.left, panel.top - 12},
      fmt::format("copies {} beside {}, each with what 95 % of draws of pairs have between them",
                  to_string(panel.way), panel.load));
  for (int i = 0; i <= kPanelTicks; ++i) {
    const double part = static_cast<double>(i) / kPanelTicks;
    const double ratio = panel.least_ratio + (panel.most_ratio - panel.least_ratio) * part;
    svg.line(i == 0 ? "axis" : "grid", {panel.left, panel.y(ratio)}, {panel.right, panel.y(ratio)});
    svg.text({panel.left - 8, panel.y(ratio) + 4}, fmt::format("{:.5g}", ratio), Anchor::kEnd);
    const double x = panel.x(panel.most_share * part);
    svg.line(i == 0 ? "axis" : "grid", {x, panel.top}, {x, panel.bottom});
    svg.text({x, panel.bottom + 20}, fmt::format("{:.4g} %", 100 * panel.most_share * part),
             Anchor::kMiddle);
  }
  if (panel.least_ratio < 1) {
    svg.line("axis", {panel.left, panel.y(1)}, {panel.right, panel.y(1)});
  }
  svg.upright_text({22, (panel.top + panel.bottom) / 2},
                   fmt::format("p99 of {}, times that without copies",
                               panel.load == "decode" ? "tokens" : "rounds"));
  svg.text({(panel.left + panel.right) / 2, panel.bottom + 40}, "share of the idle link",
           Anchor::kMiddle);
}

/// A label's rectangle.
struct LabelBox {
  double left = 0;
  double right = 0;
  double base = 0;  ///< Where its letters stand.

  [[nodiscard]] bool meets(const LabelBox& other) const {
    return left < other.right && other.left < right && std::abs(base - other.base) < kLineHeight;
  }
};

/// Beside the mark, or as near above or below as no other label and no mark stands.
LabelBox free_place(const InterferencePanel& panel,
                    SvgDrawing::Point mark,
                    std::size_t letters,
                    const std::vector<LabelBox>& taken) {
  const double width = kLetterWidth * static_cast<double>(letters);
  const double gap = kMarkRadius + 5;
  const bool at_left = mark.x + gap + width > panel.right;
  const double left = at_left ? mark.x - gap - width : mark.x + gap;
  LabelBox box{left, left + width, 0};
  for (int line = 0;; ++line) {
    for (const int way : {-1, 1}) {
      box.base = mark.y + 4 + way * line * kLineHeight;
      const bool inside = box.base - kLineHeight > panel.top && box.base < panel.bottom;
      const bool free = std::none_of(taken.begin(), taken.end(),
                                     [&box](const LabelBox& other) { return box.meets(other); });
      if (free && inside) return box;
    }
    // All lines are taken: then one over another.
    if (line * kLineHeight > panel.bottom - panel.top) {
      box.base = mark.y + 4;
      return box;
    }
  }
}

}  // namespace

double InterferencePanel::x(double share) const {
  return left + (right - left) * share / most_share;
}

double InterferencePanel::y(double ratio) const {
  return bottom - (bottom - top) * (ratio - least_ratio) / (most_ratio - least_ratio);
}

std::vector<InterferencePanel> interference_panels(const BenchReport& report,
                                                   double left,
                                                   double right,
                                                   double top) {
  std::vector<InterferencePanel> panels;
  for (const BenchFigure& figure : report.figures) {
    if (figure.load.empty() || !figure.share || !figure.round_us) continue;
    panel_for(figure, panels).figures.push_back(&figure);
  }
  for (InterferencePanel& panel : panels) {
    panel.left = left;
    panel.right = right;
    panel.top = top + kHeadHeight;
    panel.bottom = panel.top + kMarksHeight;
    set_scale(panel);
    top += kInterferencePanelHeight;
  }
  return panels;
}

std::string mark_name(const InterferencePanel& panel, const BenchFigure& figure) {
  const BenchPoint& point = figure.point;
  const auto differ = [&](auto same) {
    return std::any_of(panel.figures.begin(), panel.figures.end(), [&](const BenchFigure* other) {
      return other->strategy != kOneCopy && !same(other->point);
    });
  };
  std::string name = figure.strategy;
  if (figure.path != BenchPath::kEngine) name = fmt::format("{} {}", to_string(figure.path), name);
  if (figure.strategy == kOneCopy) return name;
  name += ", " + cache_of(point);
  if (differ([&](const BenchPoint& other) { return other.regions == point.regions; })) {
    name += fmt::format(" x {}", point.regions);
  }
  if (differ([&](const BenchPoint& other) { return other.blocks == point.blocks; })) {
    name += fmt::format(", {} block{}", point.blocks, point.blocks == 1 ? "" : "s");
  }
  if (differ([&](const BenchPoint& other) { return other.locality == point.locality; })) {
    name += fmt::format(", {}", to_string(point.locality));
  }
  return name;
}

void draw_panel(const InterferencePanel& panel, SvgDrawing& svg) {
  add_panel_frame(panel, svg);
  std::vector<LabelBox> taken;
  std::vector<SvgDrawing::Point> marks;
  for (const BenchFigure* figure : panel.figures) {
    const SvgDrawing::Point mark{panel.x(*figure->share), panel.y(ratio_of(*figure))};
    marks.push_back(mark);
    taken.push_back({mark.x - kMarkRadius, mark.x + kMarkRadius, mark.y + 4});
    const std::string style = mark_style(*figure);
    if (const auto& spread = figure->p99_spread) {
      svg.line("line " + style, {mark.x, panel.y(spread->low)}, {mark.x, panel.y(spread->high)});
    }
    svg.circle(style, mark, kMarkRadius);
  }
  for (std::size_t i = 0; i < marks.size(); ++i) {
    const std::string name = mark_name(panel, *panel.figures[i]);
    const LabelBox box = free_place(panel, marks[i], name.size(), taken);
    taken.push_back(box);
    const bool at_left = box.right < marks[i].x;
    const double near = at_left ? box.right : box.left;
    if (std::abs(box.base - 4 - marks[i].y) > 1) {
      svg.line("grid", marks[i], {at_left ? near + 2 : near - 2, box.base - 4});
    }
    svg.text({near, box.base}, name,
             at_left ? SvgDrawing::Anchor::kEnd : SvgDrawing::Anchor::kStart);
  }
}

}  // namespace kvferry::cli
