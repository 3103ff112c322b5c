// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>

namespace kvferry::ipc {

using MonotonicClock = std::chrono::steady_clock;
using TimePoint = MonotonicClock::time_point;
using Duration = MonotonicClock::duration;

/// A point on the monotonic clock after which a wait must have ended. Jumps of the wall clock do
/// not move it.
class Deadline {
 public:
  static Deadline after(Duration duration) { return Deadline(MonotonicClock::now() + duration); }
  static constexpr Deadline at(TimePoint when) { return Deadline(when); }

  [[nodiscard]] TimePoint when() const noexcept { return when_; }
  [[nodiscard]] bool expired() const noexcept { return MonotonicClock::now() >= when_; }
  /// Time left, never negative.
  [[nodiscard]] Duration remaining() const noexcept {
    return std::max(Duration::zero(), when_ - MonotonicClock::now());
  }
  /// For poll(2): milliseconds left, rounded up so that a wait never ends early and then spins.
  [[nodiscard]] int poll_timeout_ms() const noexcept {
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(remaining()).count();
    return static_cast<int>(std::min<std::chrono::milliseconds::rep>(ms, 1'000'000));
  }
  [[nodiscard]] Deadline earlier(Deadline other) const noexcept {
    return when_ < other.when_ ? *this : other;
  }

 private:
  constexpr explicit Deadline(TimePoint when) : when_(when) {}
  TimePoint when_;
};

}  // namespace kvferry::ipc
