// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/os/event_loop.hpp"

#include <functional>
#include <utility>

namespace kvferry::worker {

/// Calls trim() once when no step has run for `after`, and not again until one has. One timer, set
/// for when the time can be over at the soonest; no step has to move it.
/// @threading the loop's thread.
class IdleTrim {
 public:
  /// after: zero for never. The time from here on counts as one after a step.
  IdleTrim(ipc::EventLoop& loop, ipc::Duration after, std::function<void()> trim)
      : loop_(loop), after_(after), trim_(std::move(trim)) {
    on_idle();
  }
  IdleTrim(const IdleTrim&) = delete;
  IdleTrim& operator=(const IdleTrim&) = delete;
  ~IdleTrim() { loop_.cancel(timer_); }

  void on_busy() { busy_ = true; }
  /// The last step that ran has ended.
  void on_idle() {
    busy_ = false;
    idle_since_ = ipc::MonotonicClock::now();
    if (after_ > ipc::Duration::zero() && !armed_) arm(after_);
  }

 private:
  void arm(ipc::Duration time) {
    armed_ = true;
    timer_ = loop_.after(time, [this] { on_time(); });
  }
  void on_time() {
    armed_ = false;
    if (busy_) return;  // on_idle() starts over.
    const auto left = idle_since_ + after_ - ipc::MonotonicClock::now();
    if (left > ipc::Duration::zero()) {
      arm(left);
    } else {
      trim_();
    }
  }

  ipc::EventLoop& loop_;
  const ipc::Duration after_;
  const std::function<void()> trim_;
  bool busy_ = false;
  bool armed_ = false;
  ipc::TimePoint idle_since_;
  ipc::TimerId timer_ = 0;
};

}  // namespace kvferry::worker
