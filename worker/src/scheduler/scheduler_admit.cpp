// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/worker/load_plan.hpp"
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
constexpr ipc::Duration kBusyRetry = 5ms;
constexpr std::uint32_t kMostLoadTries = 400;
/// Of a sequence, while what was found in host memory keeps going.
constexpr std::uint32_t kMostPlans = 3;
constexpr ipc::Duration kWithoutOffload = 5s;
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
    const bool first = next == waiting_.begin();  // What goes before it is not waited for.
    if (!cache_.may_fit(sequence)) return prefer_first(first);
    // Its turn is when there is room for it: until then more of its prefix comes.
    if (!prefetch_lets_start(number)) {
      ++next;
      continue;
    }
    const bool admitted = try_admit(sequence);
    // A word with the manager can bring news of another arena or other weights: start over.
    if (era != era_ || weights != weights_ || !is_ready()) return pump_later();
    if (!admitted) return prefer_first(first);
    first_alone_ = false;
    next = waiting_.erase(next);
  }
}

// Nothing that ends would make room for it: what prefetches hold does.
void Scheduler::prefer_first(bool is_first) {
  if (!is_first || !admitted_.empty() || prefetched_.empty()) return;
  if (!store_jobs_.empty() && manager_answers()) return;
  first_alone_ = true;
  end_prefetches();
  pump_later();
}

bool Scheduler::try_admit(Sequence& sequence) {
  const auto prefetched = prefetched_.find(sequence.number);
  const bool may_load = prefetched == prefetched_.end() || !prefetched->second.incomplete;
  bool looks = !sequence.hashes.empty() && offload_usable() && !sequence.device_only && may_load;
  if (looks) {
    const std::uint64_t era = era_;
    const ipc::Digest weights = weights_;
    ask_whether_manager_serves(sequence);
    look_at_state();
    if (era != era_ || weights != weights_ || !phase_ready_) return false;
    looks = offload_usable();
  }
  const std::uint64_t generation = generation_;
  const ipc::Digest weights = weights_;
  std::vector<PinnedBlock> pinned;
  const auto wanted = plan_to_admit(sequence, looks, pinned);
  if (!wanted) return false;
  look_at_state();  // What was asked may have brought news.
  if (generation != generation_ || weights != weights_ || !phase_ready_) {
    pins_.let_go(std::move(pinned));
    pump_later();
    return false;
  }
  std::vector<LoadItem> loads;
  const PagedCache::Admission admission = cache_.admit(
      sequence, *wanted,
      [this](ipc::GroupId group, std::uint32_t position) { return place_of(group, position); },
      loads);
  if (admission == PagedCache::Admission::kNoRoom) {
    pins_.let_go(std::move(pinned));
    return false;
  }
  choice_.on_done(decision_, ipc::MonotonicClock::now());
  end_prefetch(sequence.number);
  sequence.device_only = false;
  admitted_.insert(sequence.number);
  ++sequence.admissions;
  if (sequence.cached_at == 0) {
    sequence.cached_tokens = sequence.computed;
    sequence.cached_at = sequence.admissions;
  }
  // What it finds of its prompt was computed with these.
  if (sequence.generated() == 0) sequence.weights_first = weights_;
  sequence.state = Sequence::State::kReady;
  // First, so that it waits for no word with the manager, and none can bring news before.
  if (!loads.empty()) submit_loads(sequence.number, std::move(loads), std::move(pinned));
  if (looks) tell_use(sequence);
  store_new_blocks(sequence);  // What it found may be wanted in host memory now.
  return true;
}

std::optional<PrefixPlan> Scheduler::plan_to_admit(const Sequence& sequence,
                                                   bool& looks,
                                                   std::vector<PinnedBlock>& pinned) {
  for (std::uint32_t tries = 0;; ++tries) {
    looks = looks && tries < kMostPlans && offload_usable();
    PrefixPlan wanted = plan_for(sequence, looks);
    if (!cache_.fits(wanted, sequence) || !make_room(sequence, wanted)) return std::nullopt;
    // Rather a load that fails in part than none, where each plan meets other units that lack some.
    const bool is_last = tries + 1 >= kMostPlans;
    if (pin_loads(wanted, pinned, is_last ? LoadPins::Parts::kAny : LoadPins::Parts::kAsPlanned)) {
      return wanted;
    }
  }
}

bool Scheduler::pin_loads(const PrefixPlan& plan,
                          std::vector<PinnedBlock>& pinned,
                          LoadPins::Parts parts) {
  if (plan.host_hits == 0) return true;
  const auto where = [this](ipc::GroupId group, std::uint32_t position) {
    return place_of(group, position);
  };
  auto taken = pins_.take(*client_, plan, where, parts);
  if (!taken) {
    ipc::log_debug("scheduler: pins: {}", taken.error().to_string());
    if (taken.error().code == ipc::ErrorCode::kTimeout) do_without_offload();
    return false;
  }
  for (const LoadPins::Lacking& one : taken->lacking) {
    note_lacking(one.group, one.place, static_cast<std::uint8_t>(ErrorCode::kNotFound));
  }
  pinned = std::move(taken->pinned);
  return taken->gone == 0;
}

PrefixPlan Scheduler::plan_for(const Sequence& sequence, bool looks) {
  decision_ = {};
  const auto nowhere = [](ipc::GroupId, std::uint32_t) { return BlockSource::kNowhere; };
  PrefixPlan on_device = cache_.plan(sequence, nowhere);
  if (!looks) return on_device;
  places_.emplace(cache_.units(), config_.geometry.groups, sequence.hashes,
                  [this](ipc::GroupId group, const UnitPart& place) {
                    return client_->presence(group, place.key) == Presence::kHit &&
                           !lacking_.has(group, place);
                  });
  PrefixPlan anywhere = cache_.plan(sequence, [&](ipc::GroupId group, std::uint32_t position) {
    return places_->find(group, position) ? BlockSource::kHost : BlockSource::kNowhere;
  });
  const std::uint32_t per_block = cache_.tokens_per_block();
  ChosenPlan chosen =
      choose_loads(choice_, config_.geometry, std::move(anywhere), std::move(on_device),
                   (sequence.length() + per_block - 1) / per_block,
                   static_cast<std::uint32_t>(sequence.hashes.size()), per_block, loading_bytes_,
                   ipc::MonotonicClock::now());
  decision_ = chosen.decision;
  return std::move(chosen.plan);
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
  for (const std::vector<ipc::Digest>& chain :
       places_->chains(static_cast<std::uint32_t>(std::min(found, sequence.hashes.size())))) {
    const auto used = client_->use_prefix(chain);
    if (!used) ipc::log_debug("scheduler: use of a prefix: {}", used.error().to_string());
  }
}

UnitPart Scheduler::place_of(ipc::GroupId group, std::uint32_t position) {
  const auto place = places_->find(group, position);
  KVFERRY_CHECK(place.has_value(), "a planned load from nowhere");
  return *place;
}

ipc::Result<ipc::JobId> Scheduler::send_load(std::span<const LoadItem> items,
                                             std::uint8_t priority,
                                             std::optional<ipc::TimePoint> due) {
  // A load names the generation that was acknowledged last. The blocks are of the one that was
  // acted on, which may be an earlier one: then they are other memory's by now.
  if (!offload_usable()) {
    return KVFERRY_ERROR(kStaleEpoch,
                         "a load of {} blocks, planned in generation {}, is not sent in {}: host "
                         "memory is not usable, or the device's blocks are others now",
                         items.size(), generation_, client_->state().generation);
  }
  return client_->submit_load(items, priority, std::nullopt, due);
}

void Scheduler::submit_loads(Number number,
                             std::vector<LoadItem> items,
                             std::vector<PinnedBlock> pinned) {
  Sequence& sequence = sequences_.at(number);
  const auto job = send_load(items, ipc::Urgency::kOrdinary, std::nullopt);
  if (job) {
    sequence.state = Sequence::State::kLoading;
    LoadJob load;
    load.number = number;
    load.submitted = ipc::MonotonicClock::now();
    for (const LoadItem& item : items) load.bytes += link_bytes(config_.geometry, item.group);
    loading_bytes_ += load.bytes;
    load.items = std::move(items);
    load.pinned = std::move(pinned);
    load_jobs_.emplace(*job, std::move(load));
    return;
  }
  ipc::log_debug("scheduler: load not sent: {}", job.error().to_string());
  pins_.let_go(std::move(pinned));
  sequence.found_nothing();
  sequence.state = Sequence::State::kReady;
  sequence.device_only = job.error().code != ipc::ErrorCode::kStaleEpoch;
  if (sequence.fate == Sequence::Fate::kGoesOn) sequence.fate = Sequence::Fate::kWaits;
  pump_later();  // News is acted on, and the sequence is let in anew.
}

// It keeps its blocks meanwhile, and counts as loading.
void Scheduler::load_again(LoadJob job) {
  loop_.after(kBusyRetry, [this, alive = alive_, job = std::move(job)] {
    if (!*alive) return;
    if (sequences_.at(job.number).fate == Sequence::Fate::kGoesOn) {
      submit_loads(job.number, job.items, job.pinned);
      if (sequences_.at(job.number).in_flight()) return;
    } else {
      pins_.let_go(job.pinned);
    }
    sequences_.at(job.number).state = Sequence::State::kReady;
    settle(job.number);
  });
}

void Scheduler::on_load_done(LoadJob job, const Completion& completion) {
  Sequence& sequence = sequences_.at(job.number);
  loading_bytes_ -= job.bytes;
  choice_.on_loaded(completion.bytes, job.submitted, ipc::MonotonicClock::now());
  if (completion.all_ok()) {
    if (sequence.fate == Sequence::Fate::kGoesOn && !sequence.mixed) {
      (void)cache_.publish(sequence);
      for (const LoadItem& item : job.items) {
        cache_.mark_loaded(item.group, {item.key, item.part});
      }
    }
  } else {
    ipc::log_debug("scheduler: load of request {}: {}", job.number, completion.message);
    const auto busy = static_cast<std::uint8_t>(ipc::ErrorCode::kBusy);
    const bool all_busy = std::all_of(completion.results.begin(), completion.results.end(),
                                      [busy](std::uint8_t result) { return result == busy; });
    // Full queues are worth another try, all else is computed again.
    if (all_busy && ++sequence.load_tries < kMostLoadTries) return load_again(std::move(job));
    for (std::size_t i = 0; i < std::min(job.items.size(), completion.results.size()); ++i) {
      const LoadItem& item = job.items[i];
      note_lacking(item.group, {item.key, item.part}, completion.results[i]);
    }
    keep_what_came(sequence, job, completion);
    sequence.device_only = true;
    sequence.found_nothing();
    if (sequence.fate == Sequence::Fate::kGoesOn) sequence.fate = Sequence::Fate::kWaits;
  }
  pins_.let_go(std::move(job.pinned));
  sequence.state = Sequence::State::kReady;
  settle(job.number);
}

void Scheduler::keep_what_came(Sequence& sequence,
                               const LoadJob& job,
                               const Completion& completion) {
  if (sequence.fate != Sequence::Fate::kGoesOn || sequence.mixed) return;
  if (completion.results.size() != job.items.size()) return;
  std::vector<LoadItem> came;
  for (std::size_t i = 0; i < job.items.size(); ++i) {
    const auto code = static_cast<ErrorCode>(completion.results[i]);
    // The memory may be gone or another one's by now, of which the news has not come yet.
    if (code == ErrorCode::kStaleEpoch || code == ErrorCode::kRevoked ||
        code == ErrorCode::kPeerDied) {
      return;
    }
    if (completion.results[i] == 0) came.push_back(job.items[i]);
  }
  cache_.publish_loaded(sequence, came);
}

void Scheduler::note_lacking(ipc::GroupId group, const UnitPart& place, std::uint8_t result) {
  lacking_.note(group, place, result);
  if (result == static_cast<std::uint8_t>(ipc::ErrorCode::kNotFound)) {
    cache_.mark_not_found(group, place);
  }
}

void Scheduler::do_without_offload() {
  ipc::log_warn("scheduler: the manager does not answer; goes on without host memory for {} s",
                kWithoutOffload.count() / 1'000'000'000);
  no_offload_before_ = ipc::MonotonicClock::now() + kWithoutOffload;
}

}  // namespace kvferry::worker
