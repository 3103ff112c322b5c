// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "schedule_orders.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <utility>

namespace kvferry::worker {

using ipc::Envelope;
using ipc::ScheduleOrder;
using ipc::SchedulerLoad;

namespace {

std::optional<ipc::PauseMode> pause_of(ScheduleOrder order) {
  switch (order) {
    case ScheduleOrder::kAbort: return ipc::PauseMode::kAbort;
    case ScheduleOrder::kRetract: return ipc::PauseMode::kRetract;
    case ScheduleOrder::kInPlace: return ipc::PauseMode::kInPlace;
    case ScheduleOrder::kRun:
    case ScheduleOrder::kFlush:
    case ScheduleOrder::kIdle: break;
  }
  return std::nullopt;
}

bool waits_for_idle(ScheduleOrder order) {
  return order == ScheduleOrder::kFlush || order == ScheduleOrder::kIdle;
}

ipc::Error not_idle(const SchedulerLoad& load) {
  return KVFERRY_ERROR(kNotIdle,
                       "not idle: {} requests run, {} are frozen in place, {} transfers are in "
                       "flight; nothing was changed. Retract or abort them, or give it time",
                       load.running, load.frozen, load.transfers);
}

}  // namespace

void ScheduleOrders::take(Envelope request) {
  const auto order = ipc::decode<ipc::Schedule>(request.body, "Schedule");
  request.body.clear();
  if (!order) {
    answer(request, order.error());
  } else if (scheduler_ == nullptr) {
    answer(request, KVFERRY_ERROR(kInvalidArgument,
                                  "this engine's client has no scheduler to be ordered about: "
                                  "connect it with ClientOptions::scheduler"));
  } else {
    arrived_.push_back({std::move(request), *order});
  }
}

void ScheduleOrders::lose_manager() {
  arrived_.clear();
  open_.reset();
  look_again_ = false;
  hold_is_orphaned_ = held_idle_;
}

// The scheduler may call its client, which pumps: orders that come then are begun after this one,
// and the manager may be lost at every call.
void ScheduleOrders::serve() {
  if (scheduler_ == nullptr || std::exchange(serving_, true)) return;
  look_again_ = false;
  if (std::exchange(hold_is_orphaned_, false) && std::exchange(held_idle_, false)) {
    ipc::log_info("schedule: the manager that held requests for a while is gone, they run again");
    scheduler_->resume();
  }
  bool more = true;
  while (more) {
    if (open_) take_effect();
    more = !arrived_.empty();
    if (more) begin_next();
  }
  serving_ = false;
  if (hold_is_orphaned_) serve();  // The manager was lost meanwhile.
}

void ScheduleOrders::begin_next() {
  Open next = std::move(arrived_.front());
  arrived_.pop_front();
  if (open_) {
    const Open replaced = *std::exchange(open_, std::nullopt);
    answer(replaced.request,
           waits_for_idle(replaced.order.order)
               ? not_idle(load())
               : KVFERRY_ERROR(kCancelled, "another order came before it took effect"));
  }
  open_ = std::move(next);
  const ScheduleOrder order = open_->order.order;
  if (const std::optional<ipc::PauseMode> mode = pause_of(order)) {
    ipc::log_info("schedule: pauses ({})", to_string(*mode));
    paused_ = mode;
    paused_by_release_ = open_->order.for_release;
    held_idle_ = false;
    scheduler_->hold(static_cast<PauseMode>(*mode));
  } else if (order == ScheduleOrder::kRun) {
    const bool was_paused = std::exchange(paused_, std::nullopt).has_value();
    paused_by_release_ = false;
    if (std::exchange(held_idle_, false) || was_paused) {
      ipc::log_info("schedule: runs");
      scheduler_->resume();
    }
  }
}

void ScheduleOrders::take_effect() {
  const Open open = *open_;  // The manager may be lost, and it with it, in a call below.
  const SchedulerLoad now = load();
  if (!open_) return;
  switch (open.order.order) {
    case ScheduleOrder::kRun: break;
    case ScheduleOrder::kAbort:
    case ScheduleOrder::kRetract:
      if (!now.is_idle()) return;
      break;
    case ScheduleOrder::kInPlace:
      if (now.running > 0) return;
      break;
    case ScheduleOrder::kFlush:
    case ScheduleOrder::kIdle:
      if (!now.is_idle()) {
        if (!open.order.wait) {
          open_.reset();
          answer(open.request, not_idle(now));
        }
        return;
      }
      if (!paused_ && !std::exchange(held_idle_, true)) scheduler_->hold(PauseMode::kInPlace);
      if (open.order.order == ScheduleOrder::kFlush) {
        ipc::log_info("schedule: idle, the cache's contents are forgotten");
        scheduler_->reset_cache();
      }
      break;
  }
  open_.reset();
  answer(open.request, load());
}

SchedulerLoad ScheduleOrders::load() const {
  const ScheduledWork work = scheduler_->count();
  return {.running = work.running,
          .frozen = work.frozen,
          .waiting = work.waiting,
          .transfers = transfers_()};
}

void ScheduleOrders::answer(const Envelope& request,
                            const ipc::Result<SchedulerLoad>& result) const {
  Envelope reply;
  reply.kind = request.kind;
  reply.request = request.request;
  reply.is_reply = true;
  if (result) {
    reply.body = ipc::encode(*result);
  } else {
    reply.error = result.error();
  }
  send_(reply);
}

}  // namespace kvferry::worker
