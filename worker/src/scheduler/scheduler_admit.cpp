// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "scheduler/scheduler.hpp"

#include <algorithm>
#include <utility>

/// From the queue into the batch, and what host memory has to do with it.
namespace kvferry::worker {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

namespace {

/// A manager that does not answer within it serves no load either, whatever its table shows. Asked
/// once in kManagerLook.
constexpr ipc::Duration kManagerTime = 1s;
constexpr ipc::Duration kManagerLook = 1s;
constexpr ipc::Duration kReserveTime = 1s;
constexpr ipc::Duration kBusyRetry = 5ms;
constexpr std::uint32_t kMostLoadTries = 400;
constexpr ipc::Duration kWithoutOffload = 5s;
constexpr std::uint8_t kLoadPriority = 1;
constexpr std::size_t kMaxBatch = PassLimits{}.sequences;

}  // namespace

void Scheduler::admit_waiting() {
  const std::uint64_t era = era_;
  const ipc::Digest weights = weights_;
  for (auto next = waiting_.begin(); next != waiting_.end() && admitted_.size() < kMaxBatch;) {
    const Number number = *next;
    Sequence& sequence = sequences_.at(number);
    if (const auto fits = cache_.check_fits(sequence.prompt_tokens + sequence.max_tokens); !fits) {
      refuse(sequence.asker, fits.error());
      ++next;
      end(number);
      continue;
    }
    // Room for what runs to grow by a block each, or one would push the other out again and again.
    if (!admitted_.empty() && cache_.least_available() <= admitted_.size()) return;
    if (!cache_.may_fit(sequence)) return;
    const bool admitted = try_admit(sequence);
    // A word with the manager can bring news of another arena or other weights: start over.
    if (era != era_ || weights != weights_ || !is_ready()) return pump_later();
    if (!admitted) return;
    next = waiting_.erase(next);
  }
}

bool Scheduler::try_admit(Sequence& sequence) {
  bool looks = !sequence.hashes.empty() && offload_usable() && !sequence.device_only;
  if (looks) {
    const std::uint64_t era = era_;
    const ipc::Digest weights = weights_;
    ask_whether_manager_serves(sequence);
    look_at_state();
    if (era != era_ || weights != weights_ || !phase_ready_) return false;
    looks = offload_usable();
  }
  const auto have = [&](ipc::GroupId group, std::uint32_t position) {
    const bool hit = looks && client_->presence(group, sequence.hashes[position]) == Presence::kHit;
    return hit ? BlockSource::kHost : BlockSource::kNowhere;
  };
  std::vector<LoadItem> loads;
  const PagedCache::Admission admission = cache_.admit(sequence, have, loads);
  if (admission == PagedCache::Admission::kNoRoom) return false;
  sequence.device_only = false;
  admitted_.insert(sequence.number);
  if (sequence.admissions++ == 0) sequence.cached_tokens = sequence.computed;
  // What it finds of its prompt was computed with these.
  if (sequence.generated() == 0) sequence.weights_first = weights_;
  sequence.state = Sequence::State::kReady;
  if (looks) tell_use(sequence);
  if (!loads.empty()) submit_loads(sequence.number, std::move(loads));
  return true;
}

void Scheduler::ask_whether_manager_serves(const Sequence& sequence) {
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  if (now - manager_asked_ < kManagerLook) return;
  manager_asked_ = now;
  const auto found =
      client_->lookup(std::span(sequence.hashes).first(1), ipc::Deadline::after(kManagerTime));
  if (found) return;
  ipc::log_debug("scheduler: lookup: {}", found.error().to_string());
  if (found.error().code == ipc::ErrorCode::kTimeout) do_without_offload();
}

// So that host memory keeps it, whichever memory it was found in.
void Scheduler::tell_use(const Sequence& sequence) {
  const std::size_t found = sequence.computed / cache_.tokens_per_block();
  const auto used = client_->use_prefix(
      std::span(sequence.hashes).first(std::min(found, sequence.hashes.size())));
  if (!used) ipc::log_debug("scheduler: use of a prefix: {}", used.error().to_string());
}

void Scheduler::submit_loads(Number number, std::vector<LoadItem> items) {
  Sequence& sequence = sequences_.at(number);
  const auto job = client_->submit_load(items, kLoadPriority);
  if (job) {
    sequence.state = Sequence::State::kLoading;
    load_jobs_.emplace(*job, LoadJob{number, std::move(items)});
    return;
  }
  ipc::log_debug("scheduler: load not sent: {}", job.error().to_string());
  sequence.state = Sequence::State::kReady;
  sequence.device_only = true;
  if (sequence.fate == Sequence::Fate::kGoesOn) sequence.fate = Sequence::Fate::kWaits;
}

// It keeps its blocks meanwhile, and counts as loading.
void Scheduler::load_again(LoadJob job) {
  loop_.after(kBusyRetry, [this, alive = alive_, job = std::move(job)] {
    if (!*alive) return;
    if (sequences_.at(job.number).fate == Sequence::Fate::kGoesOn) {
      submit_loads(job.number, job.items);
      if (sequences_.at(job.number).in_flight()) return;
    }
    sequences_.at(job.number).state = Sequence::State::kReady;
    settle(job.number);
  });
}

void Scheduler::on_load_done(LoadJob job, const Completion& completion) {
  Sequence& sequence = sequences_.at(job.number);
  if (completion.all_ok()) {
    if (sequence.fate == Sequence::Fate::kGoesOn && !sequence.mixed) {
      (void)cache_.publish(sequence);
      for (const LoadItem& item : job.items) cache_.mark_stored(item.group, item.block);
    }
  } else {
    ipc::log_debug("scheduler: load of request {}: {}", job.number, completion.message);
    const auto busy = static_cast<std::uint8_t>(ipc::ErrorCode::kBusy);
    const bool all_busy = std::all_of(completion.results.begin(), completion.results.end(),
                                      [busy](std::uint8_t result) { return result == busy; });
    // Full queues are worth another try, all else is computed again.
    if (all_busy && ++sequence.load_tries < kMostLoadTries) return load_again(std::move(job));
    sequence.device_only = true;
    if (sequence.fate == Sequence::Fate::kGoesOn) sequence.fate = Sequence::Fate::kWaits;
  }
  sequence.state = Sequence::State::kReady;
  settle(job.number);
}

void Scheduler::do_without_offload() {
  ipc::log_warn("scheduler: the manager does not answer; goes on without host memory for {} s",
                kWithoutOffload.count() / 1'000'000'000);
  no_offload_before_ = ipc::MonotonicClock::now() + kWithoutOffload;
}

void Scheduler::store_new_blocks(const Sequence& sequence) {
  if (!offload_usable()) return;
  const std::vector<PagedCache::Unstored> found = cache_.unstored(sequence);
  if (found.empty()) return;
  std::vector<StoreTarget> targets;
  targets.reserve(found.size());
  for (const PagedCache::Unstored& block : found) targets.push_back(block.target);
  const auto slots = client_->reserve_store(targets, ipc::Deadline::after(kReserveTime));
  if (!slots || slots->size() != targets.size()) {
    if (!slots) {
      ipc::log_debug("scheduler: reserve: {}", slots.error().to_string());
      if (slots.error().code == ipc::ErrorCode::kTimeout) do_without_offload();
    }
    return;
  }
  StoreJob job;
  job.era = era_;
  std::vector<StoreItem> items;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const ipc::GroupId group = found[i].target.group;
    switch ((*slots)[i].outcome) {
      case Reservation::kReserved:
        items.push_back({group, found[i].block, (*slots)[i].slot});
        job.blocks.push_back(found[i]);
        break;
      case Reservation::kAlreadyThere: cache_.mark_stored(group, found[i].block); break;
      case Reservation::kFull: break;
    }
  }
  if (items.empty()) return;
  const auto submitted = client_->submit_store(items);
  if (!submitted) {
    ipc::log_debug("scheduler: store not sent: {}", submitted.error().to_string());
    std::vector<std::uint64_t> reserved;
    reserved.reserve(items.size());
    for (const StoreItem& item : items) reserved.push_back(item.slot);
    if (const auto given_up = client_->abandon_store(reserved); !given_up) {
      ipc::log_debug("scheduler: reservations not given up: {}", given_up.error().to_string());
    }
    return;
  }
  // The copy reads these blocks: they are not handed out again before it has ended.
  for (const auto& block : job.blocks) cache_.acquire(block.target.group, block.block);
  store_jobs_.emplace(*submitted, std::move(job));
}

void Scheduler::on_store_done(const StoreJob& job, const Completion& completion) {
  if (!completion.all_ok()) ipc::log_debug("scheduler: store: {}", completion.message);
  if (job.era == era_) {
    for (std::size_t i = job.blocks.size(); i-- > 0;) {
      const PagedCache::Unstored& held = job.blocks[i];
      if (i < completion.results.size() && completion.results[i] == 0) {
        cache_.mark_stored(held.target.group, held.block);
      }
      cache_.release(held.target.group, held.block);
    }
  }
  pump_later();
}

}  // namespace kvferry::worker
