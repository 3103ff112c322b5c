// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/hand_over_meter.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace kvferry::cache_manager {
namespace {

constexpr double kBytesPerMiB = 1024.0 * 1024.0;
/// What an older sighting still counts beside the next one: about 20 of them make the estimate.
constexpr double kKeptByEach = 0.95;
/// Sightings lose half of their weight in 10 s without new ones.
constexpr double kHalfLifeSeconds = 10;
/// How far the first estimate is trusted: as a quarter of a sighting for the base, as one of 7 MiB
/// for the slope, so that sightings of one size move the base before the slope.
constexpr double kBaseTrust = 0.25;
constexpr double kSlopeTrust = 50;
/// A stall of the worker, not a cost: a second would keep staging away for long.
constexpr double kMostCounted = 50'000;

}  // namespace

double HandOverMeter::faded(ipc::TimePoint now) const noexcept {
  const double seconds = std::chrono::duration<double>(now - last_).count();
  return seconds > 0 ? std::exp2(-seconds / kHalfLifeSeconds) : 1;
}

void HandOverMeter::add(std::uint64_t bytes, ipc::Duration took, ipc::TimePoint now) noexcept {
  const HandOverCost first;
  const double x = static_cast<double>(bytes) / kBytesPerMiB;
  const double us = std::chrono::duration<double, std::micro>(took).count();
  const double y = std::clamp(us, 0.0, kMostCounted) - first.base_us - x * first.us_per_mib;
  const double kept = kKeptByEach * (weight_ > 0 ? faded(now) : 0);
  weight_ = kept * weight_ + 1;
  x_ = kept * x_ + x;
  xx_ = kept * xx_ + x * x;
  y_ = kept * y_ + y;
  xy_ = kept * xy_ + x * y;
  last_ = now;
}

// Least squares of base and slope, both drawn towards the first estimate.
HandOverCost HandOverMeter::cost(ipc::TimePoint now) const noexcept {
  HandOverCost cost;
  if (weight_ <= 0) return cost;
  const double kept = faded(now);
  const double a = kept * weight_ + kBaseTrust;
  const double b = kept * x_;
  const double d = kept * xx_ + kSlopeTrust;
  // Positive: b^2 <= (kept * weight_) * (kept * xx_), which a and d exceed by what is trusted.
  const double determinant = a * d - b * b;
  const double y = kept * y_;
  const double xy = kept * xy_;
  cost.base_us = std::max(0.0, cost.base_us + (d * y - b * xy) / determinant);
  cost.us_per_mib = std::max(0.0, cost.us_per_mib + (a * xy - b * y) / determinant);
  return cost;
}

}  // namespace kvferry::cache_manager
