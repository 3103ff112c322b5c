// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "scheduler/scheduler.hpp"

#include <algorithm>
#include <utility>

/// To host memory: what the write policy wants there, as far as the way is free.
namespace kvferry::worker {
namespace {

using std::chrono_literals::operator""s;

constexpr ipc::Duration kRoomTime = 1s;
/// Of the blocks of a group, the part that is written back ahead of its eviction: one in so many.
constexpr std::uint32_t kWrittenAhead = 8;
constexpr std::size_t kWrittenAtOnce = 256;

}  // namespace

void Scheduler::store_new_blocks(Sequence& sequence) {
  if (sequence.mixed) return;
  cache_.judge(sequence, write_policy_);
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  if (!offload_usable() || !gate_.is_open(now)) return;
  std::vector<PagedCache::Unstored> found = cache_.unstored(
      sequence, gate_.room(now), [this](const StoreTarget& target) { return is_storing(target); });
  if (found.empty()) return;
  PagedCache::keep_first(found, gate_.admit(PagedCache::count_blocks(found), now));
  if (!found.empty()) store(std::move(found), false);
}

// A reservation would say of it that it is there already, which it is not if that store fails.
bool Scheduler::is_storing(const StoreTarget& target) const {
  return storing_[target.group.value].contains(target.block);
}

bool Scheduler::is_writing_back() const {
  return std::any_of(writing_back_.begin(), writing_back_.end(),
                     [](std::uint64_t blocks) { return blocks > 0; });
}

void Scheduler::note_there(const PagedCache::Unstored& unit) {
  const StoreTarget& target = unit.target;
  // Of one that somebody stores just now nobody knows the parts, nor whether it comes.
  if (cache_.units().blocks() > 1 &&
      client_->presence(target.group, target.block) != Presence::kHit) {
    return;
  }
  lacking_.forget(target.group, target.block, target.parts);
  cache_.mark_stored(unit);
}

void Scheduler::store(std::vector<PagedCache::Unstored> units, bool evicting) {
  std::vector<StoreTarget> targets;
  targets.reserve(units.size());
  for (const PagedCache::Unstored& unit : units) targets.push_back(unit.target);
  const auto slots = client_->reserve_store(targets, ipc::Deadline::after(kRoomTime));
  if (!slots || slots->size() != targets.size()) {
    if (!slots) {
      ipc::log_debug("scheduler: reserve: {}", slots.error().to_string());
      if (slots.error().code == ipc::ErrorCode::kTimeout) do_without_offload();
    }
    return;
  }
  StoreJob job;
  job.era = era_;
  job.evicting = evicting;
  std::vector<StoreItem> items;
  std::vector<std::uint64_t> reserved;
  std::size_t full = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    PagedCache::Unstored& unit = units[i];
    const ipc::GroupId group = unit.target.group;
    std::uint32_t position = unit.position;
    switch ((*slots)[i].outcome) {
      case Reservation::kReserved:
        for (const ipc::BlockId block : unit.blocks) {
          items.push_back({group, block, (*slots)[i].slot, position++ % cache_.units().blocks()});
        }
        reserved.push_back((*slots)[i].slot);
        job.units.push_back(std::move(unit));
        break;
      case Reservation::kAlreadyThere: note_there(unit); break;
      case Reservation::kFull: full += unit.blocks.size(); break;
    }
  }
  gate_.on_full(full, ipc::MonotonicClock::now());
  if (items.empty()) return;
  const auto submitted = client_->submit_store(items);
  if (!submitted) {
    ipc::log_debug("scheduler: store not sent: {}", submitted.error().to_string());
    if (const auto given_up = client_->abandon_store(reserved); !given_up) {
      ipc::log_debug("scheduler: reservations not given up: {}", given_up.error().to_string());
    }
    return;
  }
  // The copy reads these blocks: they are not handed out again before it has ended.
  for (const PagedCache::Unstored& unit : job.units) {
    const ipc::GroupId group = unit.target.group;
    storing_[group.value].insert(unit.target.block);
    for (const ipc::BlockId block : unit.blocks) cache_.acquire(group, block);
    if (evicting) writing_back_[group.value] += unit.blocks.size();
  }
  gate_.begin(items.size());
  store_jobs_.emplace(*submitted, std::move(job));
}

void Scheduler::on_store_done(const StoreJob& job, const Completion& completion) {
  std::size_t item = PagedCache::count_blocks(job.units);
  gate_.end(item);
  for (const PagedCache::Unstored& unit : job.units) {
    storing_[unit.target.group.value].erase(unit.target.block);
  }
  if (!completion.all_ok()) {
    ipc::log_debug("scheduler: store: {}", completion.message);
    gate_.on_failed(ipc::MonotonicClock::now());
  }
  if (job.era == era_) {
    for (std::size_t u = job.units.size(); u-- > 0;) {
      const PagedCache::Unstored& unit = job.units[u];
      const ipc::GroupId group = unit.target.group;
      bool stored = true;  // All of it or nothing.
      for (std::size_t i = unit.blocks.size(); i-- > 0;) {
        --item;
        stored = stored && item < completion.results.size() && completion.results[item] == 0;
      }
      if (stored) {
        cache_.mark_stored(unit);
        lacking_.forget(group, unit.target.block, unit.target.parts);
      }
      for (std::size_t i = unit.blocks.size(); i-- > 0;) {
        if (job.evicting) {
          --writing_back_[group.value];
          cache_.release_as_oldest(group, unit.blocks[i]);
        } else {
          cache_.release(group, unit.blocks[i]);
        }
      }
    }
  }
  pump_later();
}

void Scheduler::write_back(const std::vector<EvictedBlock>& blocks) {
  if (blocks.empty() || !offload_usable()) return;
  const std::size_t most =
      std::min({blocks.size(), kWrittenAtOnce, gate_.room(ipc::MonotonicClock::now())});
  std::vector<PagedCache::Unstored> found;
  found.reserve(most);
  for (const EvictedBlock& evicted : std::span(blocks).first(most)) {
    PagedCache::Unstored unit;  // Of one block: larger ones do not go with write-back.
    unit.target = {evicted.group, evicted.hash, evicted.before};
    unit.blocks = {evicted.block};
    if (!is_storing(unit.target)) found.push_back(std::move(unit));
  }
  if (!found.empty()) store(std::move(found), true);
}

bool Scheduler::make_room(const Sequence& sequence, const PrefixPlan& wanted) {
  if (write_policy_.mode() != WriteMode::kWriteBack) return true;
  // Each of the batch may need a block more before what is written back next has been read.
  const WriteBackPlan plan =
      cache_.plan_room(sequence, wanted, admitted_.size() + 1, writing_back_, write_policy_);
  if (!plan.waits) {
    room_wanted_since_.reset();
    return true;
  }
  write_back(plan.stores);
  if (!cache_.fits(wanted, sequence)) return false;  // What is being read goes to nobody.
  const bool comes = is_writing_back();
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  // The time of each request counts from when it is the first.
  if (std::exchange(room_wanted_for_, sequence.number) != sequence.number) {
    room_wanted_since_.reset();
  }
  if (comes && !room_wanted_since_) room_wanted_since_ = now;
  if (comes && now < *room_wanted_since_ + tier_.write_back_wait) {
    loop_.cancel(room_timer_);
    room_timer_ = loop_.at(*room_wanted_since_ + tier_.write_back_wait, [this] { pump_later(); });
    return false;
  }
  room_wanted_since_.reset();
  return true;
}

void Scheduler::write_back_ahead() {
  if (write_policy_.mode() != WriteMode::kWriteBack || writing_back_.empty()) return;
  write_back(cache_.plan_ahead(kWrittenAhead, writing_back_, write_policy_).stores);
}

}  // namespace kvferry::worker
