// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/lifecycle_messages.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/worker/scheduler_control.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <utility>

namespace kvferry::worker {

/// What the manager orders an engine's scheduler to do: one order at a time, answered when it is in
/// effect. A pause outlives its manager; the hold of an idle engine, for a flush, ends with it.
/// @threading one thread. @lifetime the scheduler outlives it.
class ScheduleOrders {
 public:
  using Send = std::function<void(const ipc::Envelope& reply)>;
  /// Jobs without a completion that was taken.
  using Transfers = std::function<std::uint64_t()>;

  /// scheduler: null when the engine has none to be ordered about.
  ScheduleOrders(SchedulerControl* scheduler, Transfers transfers, Send send)
      : scheduler_(scheduler), transfers_(std::move(transfers)), send_(std::move(send)) {}

  [[nodiscard]] bool has_scheduler() const noexcept { return scheduler_ != nullptr; }
  /// The pause in force, by whichever manager.
  [[nodiscard]] std::optional<ipc::PauseMode> paused() const noexcept { return paused_; }
  /// It was for a release.
  [[nodiscard]] bool paused_by_release() const noexcept { return paused_by_release_; }

  /// An order has come; it is begun by the next serve().
  void take(ipc::Envelope request);
  /// The orders of a lost manager are nobody's.
  void lose_manager();
  /// Begins what has come and answers what is in effect by now. Does nothing from within one of the
  /// scheduler's own calls.
  void serve();
  /// What may have kept an order from being in effect has changed.
  void look_again() noexcept { look_again_ = open_.has_value(); }
  /// serve() has something to begin, or to look at again.
  [[nodiscard]] bool has_news() const noexcept {
    return !arrived_.empty() || hold_is_orphaned_ || look_again_;
  }

 private:
  struct Open {
    ipc::Envelope request;  ///< Without its body.
    ipc::Schedule order;
  };

  void begin_next();
  void take_effect();
  [[nodiscard]] ipc::SchedulerLoad load() const;
  void answer(const ipc::Envelope& request, const ipc::Result<ipc::SchedulerLoad>& result) const;

  SchedulerControl* const scheduler_;
  const Transfers transfers_;
  const Send send_;
  std::deque<Open> arrived_;
  std::optional<Open> open_;  ///< Begun, not in effect.
  std::optional<ipc::PauseMode> paused_;
  bool paused_by_release_ = false;
  bool serving_ = false;
  bool held_idle_ = false;  ///< By an order for an idle engine, not by a pause.
  bool hold_is_orphaned_ = false;
  bool look_again_ = false;
};

}  // namespace kvferry::worker
