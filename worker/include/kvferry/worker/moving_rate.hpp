// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"

#include <cstdint>
#include <optional>

namespace kvferry::worker {

/// How much of something goes through per second, by what went through lately: bytes of loads,
/// tokens of prefill. Several pieces of work may be under way at a time; of a piece only the time
/// counts in which no earlier one was the one that ended, so that the sum is the time in which the
/// way was busy. Times are the caller's. @threading one thread.
class MovingRate {
 public:
  /// half_life: an amount after which what was seen before counts half. Below it, too, every piece
  /// counts, so that the first one gives a rate. time_half_life: the same by time, between the ends
  /// of pieces, for a way on which little goes; zero: only amounts count. @pre half_life > 0
  explicit MovingRate(double half_life, ipc::Duration time_half_life = ipc::Duration::zero());

  /// A piece of work that was begun at one time and ended at another. Of no time or amount: none.
  void observe(double amount, ipc::TimePoint begun, ipc::TimePoint ended);
  /// What was seen before does not count any more, as if the next piece were the first.
  void forget() noexcept;
  /// Nothing before the first piece.
  [[nodiscard]] std::optional<double> per_second() const noexcept;
  /// The end of the latest piece; the clock's epoch before the first.
  [[nodiscard]] ipc::TimePoint seen() const noexcept { return seen_; }

 private:
  double half_life_;
  ipc::Duration time_half_life_;
  double amount_ = 0;   ///< Of all pieces, older ones by less.
  double seconds_ = 0;  ///< The same of their times.
  ipc::TimePoint seen_{};
};

}  // namespace kvferry::worker
