// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"

#include <chrono>
#include <cstdint>
#include <utility>

namespace kvferry::ipc {

/// Lets one log line a second through, so that a flood of bad messages is no flood of lines.
class LogGate {
 public:
  /// True when the line may be written; suppressed is then how many were not since the last one.
  bool open(std::uint64_t& suppressed) noexcept {
    const TimePoint now = MonotonicClock::now();
    if (now < next_) {
      ++held_back_;
      return false;
    }
    next_ = now + std::chrono::seconds(1);
    suppressed = std::exchange(held_back_, 0);
    return true;
  }

 private:
  TimePoint next_;
  std::uint64_t held_back_ = 0;
};

}  // namespace kvferry::ipc
