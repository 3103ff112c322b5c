// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvferry::soak {

struct Point {
  double x = 0;
  double y = 0;
};

/// A straight line through points, by least squares.
struct Fit {
  std::size_t points = 0;
  double slope = 0;
  /// 99 % confidence interval of the slope. Its error is estimated with the correlation between
  /// neighbouring points (Newey and West): memory goes in steps, so residuals come in runs.
  double low = 0;
  double high = 0;
  double span = 0;  ///< Of x.
};
/// @pre three points or more, not all at one x.
[[nodiscard]] Fit fit_slope(std::span<const Point> points);

/// What a slope is held to. The upper end of its interval, not the slope, has to be below the
/// limit: few or noisy points prove nothing, and fail.
struct SlopeLimit {
  /// A leak of the smallest heap block per cycle is above it.
  double per_x = 32;
  /// What a short run cannot tell from the heap's warming-up: growth over all of it.
  double over_span = 0;
};
struct SlopeVerdict {
  Fit fit;
  double limit = 0;  ///< Per x.
  bool good = false;
};
/// The last 90 % of the points are judged.
[[nodiscard]] SlopeVerdict judge_slope(std::span<const Point> points, const SlopeLimit& limit);

struct Quantiles {
  std::size_t count = 0;
  double p50 = 0;
  double p99 = 0;
  double max = 0;
};
[[nodiscard]] Quantiles quantiles_of(std::vector<double> values);

/// One line of the table at the end.
struct Figure {
  std::string name;
  std::string seen;
  std::string limit;
  bool good = true;
};

}  // namespace kvferry::soak
