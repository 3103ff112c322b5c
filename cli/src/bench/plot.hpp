// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/interference_plot.hpp"
#include "bench/report.hpp"

#include <cstddef>
#include <string>
#include <vector>

namespace kvferry::cli {

/// Where values lie in the drawing, in its units: for whoever checks it.
struct BenchPlotScale {
  double left = 0;
  double right = 0;
  double first_top = 0;
  double panel_height = 0;   ///< Of one way, its labels included.
  double curves_height = 0;  ///< Of that, from zero to the most.
  std::size_t jobs = 1;      ///< Kinds of jobs, over all caches.
  double most_gbps = 1;      ///< At the top of each panel.

  [[nodiscard]] double x(std::size_t job) const;
  [[nodiscard]] double y(std::size_t panel, double gbps) const;
};
[[nodiscard]] BenchPlotScale bench_plot_scale(const BenchReport& report);
/// Those that are drawn, below the transfers if there are any. The report outlives them.
[[nodiscard]] std::vector<InterferencePanel> bench_plot_interference(const BenchReport& report);

/// GB/s of transfers over chunk sizes (or caches) and blocks of a job, a panel for each way, a
/// curve for each strategy, beside the link's limit; and of interference what copies cost each load
/// by the share of the link that they reach: an SVG drawing that follows the reader's choice of
/// light or dark.
[[nodiscard]] std::string draw_bench(const BenchReport& report);

}  // namespace kvferry::cli
