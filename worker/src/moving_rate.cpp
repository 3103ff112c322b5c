// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/moving_rate.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace kvferry::worker {

MovingRate::MovingRate(double half_life, ipc::Duration time_half_life)
    : half_life_(half_life), time_half_life_(time_half_life) {
  KVFERRY_CHECK(half_life > 0, "a rate needs a half-life");
}

void MovingRate::observe(double amount, ipc::TimePoint begun, ipc::TimePoint ended) {
  const std::chrono::duration<double> busy = ended - std::max(begun, seen_);
  const std::chrono::duration<double> since = ended - seen_;
  seen_ = std::max(seen_, ended);
  if (amount <= 0) return;
  if (time_half_life_ > ipc::Duration::zero() && amount_ > 0) {
    const double kept = std::exp2(-std::max(since.count(), 0.0) /
                                  std::chrono::duration<double>(time_half_life_).count());
    amount_ *= kept;
    seconds_ *= kept;
  }
  // Pieces that end together: the time counts for the first, the amount for each.
  const double kept = std::exp2(-amount / half_life_);
  amount_ = amount_ * kept + amount;
  seconds_ = seconds_ * kept + std::max(busy.count(), 0.0);
}

void MovingRate::forget() noexcept {
  amount_ = 0;
  seconds_ = 0;
}

std::optional<double> MovingRate::per_second() const noexcept {
  if (amount_ <= 0 || seconds_ <= 0) return std::nullopt;
  return amount_ / seconds_;
}

}  // namespace kvferry::worker
