// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"

#include <algorithm>
#include <cstdint>

namespace kvferry::cache_manager {

/// How many bytes a second may be begun: a token bucket that goes into debt, so that whatever is
/// next may begin once what was begun before is paid. @threading one thread.
class RateBudget {
 public:
  /// What is saved up while nothing is begun: as long as a thread may sleep too long.
  static constexpr std::chrono::milliseconds kSaved{4};
  /// The debt that what does not wait makes at most: others wait no longer for it.
  static constexpr std::chrono::milliseconds kMostOwed{100};

  /// 0: no limit.
  explicit RateBudget(std::uint64_t bytes_per_second) noexcept
      : rate_(static_cast<double>(bytes_per_second)) {}

  [[nodiscard]] bool is_limited() const noexcept { return rate_ > 0; }
  /// More may be begun now.
  [[nodiscard]] bool allows(ipc::TimePoint now) noexcept {
    fill(now);
    return !is_limited() || level_ >= 0;
  }
  /// When more may be begun, as long as nothing else is.
  [[nodiscard]] ipc::TimePoint next() const noexcept {
    if (!is_limited() || level_ >= 0) return filled_;
    return filled_ + std::chrono::ceil<ipc::Duration>(Seconds(-level_ / rate_));
  }
  void spend(std::uint64_t bytes, ipc::TimePoint now) noexcept {
    fill(now);
    level_ -= static_cast<double>(bytes);
  }

  /// Of what did not ask whether it may.
  void spend_unasked(std::uint64_t bytes, ipc::TimePoint now) noexcept {
    fill(now);
    const double least = std::min(level_, -rate_ * Seconds(kMostOwed).count());
    level_ = std::max(level_ - static_cast<double>(bytes), least);
  }

 private:
  using Seconds = std::chrono::duration<double>;

  void fill(ipc::TimePoint now) noexcept {
    const double most = rate_ * Seconds(kSaved).count();
    if (now > filled_) level_ = std::min(most, level_ + rate_ * Seconds(now - filled_).count());
    filled_ = std::max(filled_, now);
  }

  double rate_;
  double level_ = 0;  ///< Bytes.
  ipc::TimePoint filled_{};
};

}  // namespace kvferry::cache_manager
