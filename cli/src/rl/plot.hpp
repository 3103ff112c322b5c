// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "rl/report.hpp"

#include <cstdint>
#include <string>

namespace kvferry::cli {

/// Where values lie in the drawing, in its units: for whoever checks it.
struct PlotScale {
  double left = 0;
  double right = 0;
  double top = 0;
  double bottom = 0;
  std::uint32_t iterations = 1;
  double most_bytes = 1;  ///< At the top.

  [[nodiscard]] double x(std::uint32_t iteration) const;
  [[nodiscard]] double y(std::uint64_t bytes) const;
};
[[nodiscard]] PlotScale plot_scale(const RlReport& report);

/// Reserved device memory before and after each continue, and what is used, over the iterations
/// that were done: an SVG drawing that follows the reader's choice of light or dark.
[[nodiscard]] std::string draw_plot(const RlReport& report);

}  // namespace kvferry::cli
