// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "soak/judge.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace kvferry::soak {
namespace {

constexpr double kNormal99 = 2.576;
constexpr std::size_t kMinPoints = 3;

}  // namespace

Fit fit_slope(std::span<const Point> points) {
  KVFERRY_CHECK(points.size() >= kMinPoints, "a slope of fewer than three points");
  const auto count = static_cast<double>(points.size());
  double mean_x = 0;
  double mean_y = 0;
  for (const Point& point : points) {
    mean_x += point.x / count;
    mean_y += point.y / count;
  }
  double sum_xx = 0;
  double sum_xy = 0;
  for (const Point& point : points) {
    sum_xx += (point.x - mean_x) * (point.x - mean_x);
    sum_xy += (point.x - mean_x) * (point.y - mean_y);
  }
  KVFERRY_CHECK(sum_xx > 0, "a slope of points at one x");
  Fit fit;
  fit.points = points.size();
  fit.slope = sum_xy / sum_xx;
  fit.span = points.back().x - points.front().x;
  std::vector<double> scores;
  scores.reserve(points.size());
  for (const Point& point : points) {
    const double residual = point.y - mean_y - fit.slope * (point.x - mean_x);
    scores.push_back(residual * (point.x - mean_x));
  }
  const auto covariance = [&scores](std::size_t lag) {
    double sum = 0;
    for (std::size_t i = lag; i < scores.size(); ++i) sum += scores[i] * scores[i - lag];
    return sum;
  };
  const auto lags = static_cast<std::size_t>(std::sqrt(count));
  double variance = covariance(0);
  for (std::size_t lag = 1; lag <= lags; ++lag) {
    const double weight = 1.0 - static_cast<double>(lag) / static_cast<double>(lags + 1);
    variance += 2 * weight * covariance(lag);
  }
  variance = std::max(variance, 0.0) / (sum_xx * sum_xx) * count / (count - 2);
  const double half = kNormal99 * std::sqrt(variance);
  fit.low = fit.slope - half;
  fit.high = fit.slope + half;
  return fit;
}

SlopeVerdict judge_slope(std::span<const Point> points, const SlopeLimit& limit) {
  SlopeVerdict verdict;
  const std::span<const Point> last = points.subspan(points.size() / 10);
  if (last.size() < kMinPoints || last.front().x == last.back().x) return verdict;
  verdict.fit = fit_slope(last);
  verdict.limit = std::max(limit.per_x, limit.over_span / verdict.fit.span);
  verdict.good = verdict.fit.high < verdict.limit;
  return verdict;
}

Quantiles quantiles_of(std::vector<double> values) {
  Quantiles found;
  found.count = values.size();
  if (values.empty()) return found;
  std::sort(values.begin(), values.end());
  const auto at = [&values](double share) {
    return values[static_cast<std::size_t>(std::ceil(share * static_cast<double>(values.size()))) -
                  1];
  };
  found.p50 = at(0.5);
  found.p99 = at(0.99);
  found.max = values.back();
  return found;
}

}  // namespace kvferry::soak
