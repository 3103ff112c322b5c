// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "stream_completions.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/look.hpp"

#include <poll.h>

#include <algorithm>
#include <utility>

namespace kvferry::worker {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

namespace {
constexpr auto kWatchdogPeriod = 500ms;
constexpr auto kHangAfter = 10s;
}  // namespace

StreamCompletions::StreamCompletions(ipc::EventLoop& loop,
                                     std::unique_ptr<ipc::Stream> stream,
                                     std::string name,
                                     Failed on_device_failed,
                                     std::unique_ptr<ipc::PinnedBuffer> words)
    : loop_(loop),
      name_(std::move(name)),
      on_device_failed_(std::move(on_device_failed)),
      stream_(std::move(stream)),
      words_(std::move(words)) {
  if (words_ != nullptr) word_ = ipc::StreamWord(reinterpret_cast<std::uint32_t*>(words_->data()));
}

StreamCompletions::~StreamCompletions() {
  if (watchdog_armed_) loop_.cancel(watchdog_);
  for (const auto& slot : slots_) loop_.unwatch(slot->signalled.fd());
}

StreamCompletions::Slot& StreamCompletions::take_slot() {
  for (const auto& slot : slots_) {
    if (!slot->busy) return *slot;
  }
  Slot& slot = *slots_.emplace_back(std::make_unique<Slot>());
  loop_.watch(slot.signalled.fd(), [this, &slot] {
    if (!slot.signalled.drain() || !slot.busy) return;
    if (slot.ended) {
      slot.busy = false;
    } else {
      finish_through(slot);
    }
  });
  return slot;
}

void StreamCompletions::mark(Slot& slot) {
  slot.mark = ++marked_;
  // Whoever waits for the notice sees what is wrong.
  if (word_ && is_marked_) is_marked_ = stream_->write_word(word_, slot.mark).has_value();
}

bool StreamCompletions::has_ended(const Slot& slot) const noexcept {
  return ipc::StreamWord::has_reached(word_.load(), slot.mark);
}

void StreamCompletions::look(const Slot& oldest, ipc::Duration watch) {
  if (watch == ipc::Duration::zero()) return;
  if (looks_to_leave_out_ > 0) {
    --looks_to_leave_out_;
    return;
  }
  constexpr std::uint32_t kMostLeftOut = 32;
  const bool seen = ipc::look_for(watch, [&] { return has_ended(oldest); });
  looks_left_out_ = seen ? 0 : std::min(2 * looks_left_out_ + 1, kMostLeftOut);
  looks_to_leave_out_ = looks_left_out_;
}

void StreamCompletions::finish_seen() {
  std::vector<Slot*> ended;
  while (!order_.empty() && has_ended(*order_.front())) {
    ended.push_back(order_.front());
    order_.pop_front();
    ended.back()->ended = true;
  }
  for (Slot* slot : ended) {
    const Done done = std::exchange(slot->done, nullptr);
    if (!slot->signal_comes) slot->busy = false;
    --pending_;
    done(ipc::ok());
  }
}

void StreamCompletions::when_done(Done done, ipc::Duration watch) {
  Slot& slot = take_slot();
  slot.done = std::move(done);
  slot.since = ipc::MonotonicClock::now();
  slot.watch = watch;
  slot.busy = true;
  slot.signal_comes = false;
  slot.ended = false;
  mark(slot);
  order_.push_back(&slot);
  ++pending_;
  arm_watchdog();
  if (std::exchange(asks_, true)) return;
  loop_.post([this, alive = std::weak_ptr<bool>(alive_)] {
    if (!alive.expired()) ask();
  });
}

void StreamCompletions::ask() {
  asks_ = false;
  if (order_.empty()) return;
  if (word_ && is_marked_) {
    look(*order_.front(), order_.back()->watch);
    finish_seen();
  }
  ask_now();
}

void StreamCompletions::ask_now() {
  if (order_.empty() || order_.back()->signal_comes) return;
  Slot& last = *order_.back();
  if (const auto status = stream_->notify(last.signalled.fd()); !status) {
    ipc::log_error("{}: cannot ask for a notification: {}", name_, status.error().to_string());
    loop_.post([this, alive = std::weak_ptr<bool>(alive_)] {
      if (!alive.expired()) on_watchdog();
    });
    return;
  }
  last.signal_comes = true;
}

// The loop may see several signals at once, and then in any order; the stream gave them in ours.
void StreamCompletions::finish_through(const Slot& last) {
  // Work that failed shows here; and the stream is what orders the memory, not the eventfd.
  if (!stream_->query()) {
    on_watchdog();
    return;
  }
  std::vector<Slot*> ended;
  while (!order_.empty()) {
    ended.push_back(order_.front());
    order_.pop_front();
    if (ended.back() == &last) break;
  }
  for (Slot* slot : ended) {
    slot->signalled.drain();
    finish(*slot, ipc::ok());
  }
}

void StreamCompletions::finish(Slot& slot, const ipc::Status& status) {
  // The slot is free before the call: the callee may start new work in it.
  const Done done = std::exchange(slot.done, nullptr);
  slot.busy = false;
  --pending_;
  done(status);
}

void StreamCompletions::arm_watchdog() {
  if (watchdog_armed_) return;
  watchdog_armed_ = true;
  watchdog_ = loop_.after(kWatchdogPeriod, [this] {
    watchdog_armed_ = false;
    on_watchdog();
  });
}

void StreamCompletions::on_watchdog() {
  if (pending_ == 0) {
    hang_reported_ = false;
    return;
  }
  const auto idle = stream_->query();
  if (!idle) {
    ipc::log_error("{}: the device failed with {} launches pending: {}", name_, pending_,
                   idle.error().to_string());
    finish_all(idle.error());
    on_device_failed_(idle.error());
    return;
  }
  if (*idle) {
    finish_signalled();
    if (pending_ > 0) arm_watchdog();
    return;
  }
  if (!hang_reported_) {
    const auto now = ipc::MonotonicClock::now();
    const bool hangs = std::any_of(slots_.begin(), slots_.end(), [now](const auto& slot) {
      return slot->busy && !slot->ended && now - slot->since > kHangAfter;
    });
    if (hangs) {
      ipc::log_warn("{}: {} launches did not end within {} s; the device may hang", name_, pending_,
                    std::chrono::seconds(kHangAfter).count());
      hang_reported_ = true;
    }
  }
  arm_watchdog();
}

// The work has ended, but a slot is free only once its signal is in: one that came later would end
// the new work in it.
void StreamCompletions::finish_signalled() {
  std::vector<Slot*> ended;
  while (!order_.empty() && (!order_.front()->signal_comes || order_.front()->signalled.drain())) {
    ended.push_back(order_.front());
    order_.pop_front();
  }
  for (Slot* slot : ended) finish(*slot, ipc::ok());
}

void StreamCompletions::finish_all(const ipc::Status& status) {
  // All slots are free before the first call: a callee may start new work, which is not meant here.
  std::vector<Done> calls;
  for (Slot* slot : order_) {
    slot->signalled.drain();
    slot->busy = false;
    --pending_;
    calls.push_back(std::exchange(slot->done, nullptr));
  }
  order_.clear();
  for (const Done& done : calls) done(status);
}

}  // namespace kvferry::worker
