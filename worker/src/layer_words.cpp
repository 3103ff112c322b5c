// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/layer_words.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "make_stream.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::worker {

using ipc::Status;

namespace {

/// Each in a line of its own: a stream of the device looks at it all the time.
constexpr std::uint64_t kWordDistance = 64;
/// Work of a failed use that is still under way may write over what lets its waiters go.
constexpr std::chrono::milliseconds kLookAgain{20};
/// A use that its transfer began fails when no step begins it for so long.
constexpr std::chrono::seconds kUnbegun{30};

Status check_slot(std::uint32_t slot) {
  if (slot < ipc::kLayerSlots) return ipc::ok();
  return KVFERRY_ERROR(kInvalidArgument, "layer slot {} of {}", slot, ipc::kLayerSlots);
}

ipc::Error is_over(const LayerTicket& ticket, std::uint64_t last) {
  return KVFERRY_ERROR(
      kStaleEpoch,
      "use {} of layer slot {} is over; its last one was {}: tickets grow over all "
      "engines, see Client::layer_ticket",
      ticket.use, ticket.slot, last);
}

}  // namespace

LayerWords::LayerWords(ipc::Device& device)
    : words_(make_pinned(device, ipc::kLayerSlots * kWordDistance)) {}

ipc::StreamWord LayerWords::word(std::uint32_t slot) const noexcept {
  return ipc::StreamWord(
      reinterpret_cast<std::uint32_t*>(words_->data() + std::size_t{slot} * kWordDistance));
}

// The caller holds the mutex.
Status LayerWords::open(const LayerTicket& ticket) {
  KVFERRY_TRY(check_slot(ticket.slot));
  Slot& slot = slots_[ticket.slot];
  if (ticket.use < slot.use) return is_over(ticket, slot.use);
  if (ticket.use == slot.use) return ipc::ok();
  // A step whose waits and marks are in a stream, or will be: the next use's layers would let it
  // go, and what it marks would count as theirs.
  const bool step_runs = slot.begun && !slot.over;
  if (step_runs || slot.transfers > 0) {
    return KVFERRY_ERROR(
        kBusy,
        "layer slot {}: {} and {} transfers of use {} have not ended; begin use {} "
        "in another slot, or retry",
        ticket.slot, step_runs ? "the step" : "no step", slot.transfers, slot.use, ticket.use);
  }
  std::optional<EarlyFailure> early = std::exchange(slot, {}).early;
  slot.use = ticket.use;
  slot.over = false;
  slot.deadline = ipc::MonotonicClock::now() + kUnbegun;
  word(ticket.slot).store(0);
  if (early && early->use == ticket.use) {
    fail_slot(ticket.slot, early->error);
  } else if (early && early->use > ticket.use) {
    slot.early = std::move(early);
  }
  return ipc::ok();
}

Status LayerWords::begin(const LayerTicket& ticket, ipc::Deadline deadline, Use use) {
  {
    const std::lock_guard lock(mutex_);
    KVFERRY_TRY(open(ticket));
    if (slots_[ticket.slot].over) return is_over(ticket, ticket.use);
    Slot& slot = slots_[ticket.slot];
    slot.begun = true;
    slot.is_awaited = use == Use::kAwaitsLoad;
    if (!slot.failure && !slot.complete) slot.deadline = deadline.when();
    // A step that comes after the end of the manager that had its load: nobody else fails it.
    const auto& lost = slot.orphaned ? slot.orphaned : unserved_;
    if (slot.is_awaited && !slot.complete && lost) fail_slot(ticket.slot, *lost);
  }
  if (sooner_) sooner_();
  return ipc::ok();
}

void LayerWords::follow(const LayerTicket& store, const LayerTicket& load) {
  if (!check_slot(store.slot) || !check_slot(load.slot) || store.slot == load.slot) return;
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[load.slot];
  if (slot.use != load.use || slot.over) return;
  if (slot.failure) {
    fail_follower(store, *slot.failure);
  } else {
    slot.followers.push_back(store);
  }
}

Status LayerWords::await_layer(ipc::Stream& stream, std::uint32_t slot, std::uint32_t layer) const {
  KVFERRY_TRY(check_slot(slot));
  return stream.wait_word(word(slot), layer + 1);
}

Status LayerWords::mark_layer(ipc::Stream& stream, std::uint32_t slot, std::uint32_t layer) const {
  KVFERRY_TRY(check_slot(slot));
  return stream.write_word(word(slot), layer + 1);
}

Status LayerWords::end(const LayerTicket& ticket) {
  const std::lock_guard lock(mutex_);
  KVFERRY_TRY(open(ticket));
  Slot& slot = slots_[ticket.slot];
  if (slot.over) return is_over(ticket, ticket.use);
  slot.over = true;
  slot.deadline.reset();
  if (slot.failure) return *slot.failure;
  return ipc::ok();
}

void LayerWords::fail_slot(std::uint32_t number, const ipc::Error& error) {
  Slot& slot = slots_[number];
  if (slot.failure) return;
  slot.failure = error;
  slot.deadline.reset();
  // Before its waiters go on: what they write then is not what is to be stored.
  for (const LayerTicket& store : std::exchange(slot.followers, {})) fail_follower(store, error);
  word(number).store(kReleased);
  ipc::log_warn("layers: use {} of slot {} failed: {}", slot.use, number, error.to_string());
}

void LayerWords::fail_follower(const LayerTicket& store, const ipc::Error& error) {
  const Slot& slot = slots_[store.slot];
  if (slot.use != store.use || slot.complete) return;
  fail_slot(store.slot, KVFERRY_ERROR(kCancelled, "it is computed of what a load did not bring: {}",
                                      error.to_string()));
}

void LayerWords::note_early(const LayerTicket& ticket, const ipc::Error& error) {
  std::optional<EarlyFailure>& early = slots_[ticket.slot].early;
  if (!early || early->use < ticket.use) early = EarlyFailure{ticket.use, error};
}

void LayerWords::fail(const LayerTicket& ticket, const ipc::Error& error) {
  {
    const std::lock_guard lock(mutex_);
    // Begun by its failure, when that comes first.
    if (const Status opened = open(ticket); !opened) {
      // Nothing will come of it any more when the slot is free: whoever begins it then is told.
      if (opened.error().code == ipc::ErrorCode::kBusy) note_early(ticket, error);
      return;
    }
    fail_slot(ticket.slot, error);
  }
  if (sooner_) sooner_();
}

void LayerWords::fail_all(const ipc::Error& error) {
  {
    const std::lock_guard lock(mutex_);
    for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
      if (!slots_[slot].over || slots_[slot].transfers > 0) fail_slot(slot, error);
    }
  }
  if (sooner_) sooner_();
}

void LayerWords::fail_awaited(const ipc::Error& error) {
  {
    const std::lock_guard lock(mutex_);
    for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
      Slot& use = slots_[slot];
      if (use.over || use.complete) continue;
      if (use.is_awaited) fail_slot(slot, error);
      if (!use.begun) use.orphaned = error;
    }
    unserved_ = error;
  }
  if (sooner_) sooner_();
}

void LayerWords::serve_awaited() {
  const std::lock_guard lock(mutex_);
  unserved_.reset();
}

Status LayerWords::enter(const LayerTicket& ticket) {
  bool begins = false;
  {
    const std::lock_guard lock(mutex_);
    KVFERRY_TRY(check_slot(ticket.slot));
    begins = slots_[ticket.slot].use != ticket.use;
    KVFERRY_TRY(open(ticket));
    Slot& slot = slots_[ticket.slot];
    if (slot.failure) return *slot.failure;
    ++slot.transfers;
  }
  if (begins && sooner_) sooner_();
  return ipc::ok();
}

Status LayerWords::leave(const LayerTicket& ticket, bool is_last) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[ticket.slot];
  --slot.transfers;
  if (is_last) {
    slot.complete = true;
    slot.deadline.reset();
  }
  if (!slot.failure) return ipc::ok();
  // What the stream wrote when it got there came after the failure.
  word(ticket.slot).store(kReleased);
  return *slot.failure;
}

void LayerWords::expire(ipc::TimePoint now) {
  const std::lock_guard lock(mutex_);
  for (std::uint32_t number = 0; number < slots_.size(); ++number) {
    Slot& slot = slots_[number];
    if (slot.deadline && *slot.deadline <= now) {
      fail_slot(number, KVFERRY_ERROR(kTimeout,
                                      "use {} of layer slot {} has not ended at its deadline, at "
                                      "layer {}",
                                      slot.use, number, word(number).load()));
    } else if (slot.failure && slot.transfers > 0) {
      word(number).store(kReleased);
    }
  }
}

std::optional<ipc::TimePoint> LayerWords::next_look() const {
  const std::lock_guard lock(mutex_);
  std::optional<ipc::TimePoint> next;
  const auto at = [&next](ipc::TimePoint when) { next = next ? std::min(*next, when) : when; };
  for (const Slot& slot : slots_) {
    if (slot.deadline) at(*slot.deadline);
    if (slot.failure && slot.transfers > 0) at(ipc::MonotonicClock::now() + kLookAgain);
  }
  return next;
}

}  // namespace kvferry::worker
