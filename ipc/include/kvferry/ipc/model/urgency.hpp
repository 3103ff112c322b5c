// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>

namespace kvferry::ipc {

/// Which of two copies of one direction goes first: that of higher priority, and of two alike the
/// one that is due first; one that is never due comes after all that are.
struct Urgency {
  static constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();
  /// Priorities of loads. Up to kAhead: fetched ahead of their need. Those keep to a mover's limit
  /// of loads in a second, and are enqueued a slot of 8 MiB at a time, so that whatever goes before
  /// them waits for no more than that. kOrdinary: waited for. Above: before all of these.
  static constexpr std::uint8_t kAhead = 1;
  static constexpr std::uint8_t kOrdinary = 2;

  std::uint8_t priority = 0;
  std::uint64_t due_ns = kNever;  ///< CLOCK_MONOTONIC, which the processes of a machine share.

  [[nodiscard]] static std::uint64_t ns_of(std::optional<TimePoint> due) noexcept {
    if (!due) return kNever;
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(due->time_since_epoch());
    return ns.count() < 0 ? 0 : static_cast<std::uint64_t>(ns.count());
  }
  /// Nothing when it is never due, or later than a clock can tell.
  [[nodiscard]] std::optional<TimePoint> due() const noexcept {
    constexpr auto kLast = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    if (due_ns >= kLast) return std::nullopt;
    return TimePoint(std::chrono::duration_cast<Duration>(
        std::chrono::nanoseconds(static_cast<std::int64_t>(due_ns))));
  }
  [[nodiscard]] constexpr bool goes_before(const Urgency& other) const noexcept {
    return priority != other.priority ? priority > other.priority : due_ns < other.due_ns;
  }
  template <typename V> void visit(V& v) { v(priority, due_ns); }
};

}  // namespace kvferry::ipc
