// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/hand_over_meter.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <optional>

namespace kvferry::cache_manager {
namespace {

constexpr double kBytesPerMiB = 1024.0 * 1024.0;
/// What an older sighting still counts beside the next one: about 20 of them make the estimate.
constexpr double kKeptByEach = 0.95;
/// Without new ones sightings lose half of their weight in this time; twenty are the first
/// estimate's equal after six times that, two after three times.
constexpr double kMostFadingS = 5;
/// Slow ones in as much as they have been slow for, but not in less than this.
constexpr double kLeastFadingS = 0.1;
/// After more without any, how long they have been slow for begins anew: the slowest keep staging
/// away for little more than a minute.
constexpr double kForgottenS = 120;
/// Between sightings that follow each other nothing fades.
constexpr double kNoPauseS = 0.02;
/// Slow is what takes longer than the first estimate by this factor.
constexpr double kSlow = 2;
/// How far the first estimate is trusted: as a quarter of a sighting for the base, as one of 7 MiB
/// for the slope, so that sightings of one size move the base before the slope.
constexpr double kBaseTrust = 0.25;
constexpr double kSlopeTrust = 50;
/// A stall of the worker, not a cost: a second would keep staging away for long.
constexpr double kMostCounted = 50'000;

double seconds_between(ipc::TimePoint from, ipc::TimePoint to) noexcept {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

double HandOverMeter::fading_s() const noexcept {
  if (!slow_since_) return kMostFadingS;
  return std::clamp(seconds_between(*slow_since_, counted_), kLeastFadingS, kMostFadingS);
}

double HandOverMeter::faded(ipc::TimePoint now) const noexcept {
  const double seconds = seconds_between(counted_, now) - kNoPauseS;
  return seconds > 0 ? std::exp2(-seconds / fading_s()) : 1;
}

void HandOverMeter::add(std::uint64_t bytes, ipc::Duration took, ipc::TimePoint now) noexcept {
  const HandOverCost first;
  Sighting seen;
  seen.mib = static_cast<double>(bytes) / kBytesPerMiB;
  seen.us = std::clamp(std::chrono::duration<double, std::micro>(took).count(), 0.0, kMostCounted);
  seen.over_first = seen.us / (first.base_us + seen.mib * first.us_per_mib);
  const double pause_s = seconds_between(seen_, now);
  if (pause_s > kForgottenS) slow_since_.reset();
  // What was seen before a pause is no judge of what comes after it, unless it is slow still: jobs
  // of one hand-over each, further apart than what is slow for a moment fades in, would otherwise
  // be slow for ever and never believed.
  const bool still_slow = slow_since_ && seen.over_first > kSlow;
  if (pause_s > (still_slow ? kMostFadingS : fading_s())) before_ = {};
  seen_ = now;
  Before& before = before_.at(seen.mib < 1 ? 0 : seen.mib < 4 ? 1 : 2);
  std::array<std::optional<Sighting>, 3> last{before[0], before[1], seen};
  std::sort(last.begin(), last.end(), [](const auto& one, const auto& other) {
    return one.value_or(Sighting{}).over_first < other.value_or(Sighting{}).over_first;
  });
  if (last[1]) count(*last[1], now);
  before = {before[1], seen};
}

void HandOverMeter::count(const Sighting& seen, ipc::TimePoint now) noexcept {
  const HandOverCost first;
  const double x = seen.mib;
  const double y = seen.us - first.base_us - x * first.us_per_mib;
  const double kept = kKeptByEach * (weight_ > 0 ? faded(now) : 0);
  weight_ = kept * weight_ + 1;
  x_ = kept * x_ + x;
  xx_ = kept * xx_ + x * x;
  y_ = kept * y_ + y;
  xy_ = kept * xy_ + x * y;
  counted_ = now;
  if (seen.over_first <= kSlow) {
    slow_since_.reset();
  } else if (!slow_since_) {
    slow_since_ = now;
  }
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
