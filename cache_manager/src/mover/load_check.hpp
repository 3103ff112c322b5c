// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace kvferry::cache_manager {

/// What the check of a load by layers has found so far: compute reads what it is told of at once,
/// so that it is told of nothing before. What is copied meanwhile nobody looks at.
/// @threading any.
class LoadCheck {
 public:
  enum class State : std::uint8_t { kPending, kGood, kDamaged };

  [[nodiscard]] State state() const noexcept { return state_.load(std::memory_order_acquire); }
  void decide(bool is_good) noexcept {
    state_.store(is_good ? State::kGood : State::kDamaged, std::memory_order_release);
  }

 private:
  std::atomic<State> state_ = State::kPending;
};

}  // namespace kvferry::cache_manager
