// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/report.hpp"
#include "svg.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// What copies of one way cost one load: a mark for each figure, of a way of copying and a kind of
/// job, by its share of the link and the ratio of the 99th percentiles.
struct InterferencePanel {
  std::string load;
  Way way = Way::kToHost;
  std::vector<const BenchFigure*> figures;  ///< Of the report, which outlives this.
  double left = 0;
  double right = 0;
  double top = 0;
  double bottom = 0;       ///< Of what is drawn; its labels are below.
  double most_share = 1;   ///< At the right; the left is 0.
  double least_ratio = 1;  ///< At the bottom.
  double most_ratio = 1;

  [[nodiscard]] double x(double share) const;
  [[nodiscard]] double y(double ratio) const;
};

/// Of figures beside a load that have a share of the link: those of ranks on several devices have
/// none. top: where the first one begins, below which each takes kInterferencePanelHeight.
[[nodiscard]] std::vector<InterferencePanel> interference_panels(const BenchReport& report,
                                                                 double left,
                                                                 double right,
                                                                 double top);
inline constexpr double kInterferencePanelHeight = 380;

/// The colours that it takes are the caller's: a class for each strategy, "one-copy", "hollow".
void draw_panel(const InterferencePanel& panel, SvgDrawing& svg);

/// How a mark of the panel is called: what is not the same of all of them.
[[nodiscard]] std::string mark_name(const InterferencePanel& panel, const BenchFigure& figure);

}  // namespace kvferry::cli
