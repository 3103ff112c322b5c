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
  PagedCache::judge(sequence, write_policy_);
  std::vector<PagedCache::Unstored> found = cache_.unstored(sequence);
  std::erase_if(found,
                [this](const PagedCache::Unstored& block) { return is_storing(block.target); });
  if (found.empty() || !offload_usable()) return;
  PagedCache::keep_first(found, gate_.admit(found.size(), ipc::MonotonicClock::now()));
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

void Scheduler::store(std::vector<PagedCache::Unstored> blocks, bool evicting) {
  std::vector<StoreTarget> targets;
  targets.reserve(blocks.size());
  for (const PagedCache::Unstored& block : blocks) targets.push_back(block.target);
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
  std::size_t full = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const ipc::GroupId group = blocks[i].target.group;
    switch ((*slots)[i].outcome) {
      case Reservation::kReserved:
        items.push_back({group, blocks[i].block, (*slots)[i].slot});
        job.blocks.push_back(blocks[i]);
        break;
      case Reservation::kAlreadyThere: cache_.mark_stored(group, blocks[i].block); break;
      case Reservation::kFull: ++full; break;
    }
  }
  gate_.on_full(full, ipc::MonotonicClock::now());
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
  for (const auto& block : job.blocks) {
    cache_.acquire(block.target.group, block.block);
    storing_[block.target.group.value].insert(block.target.block);
    if (evicting) ++writing_back_[block.target.group.value];
  }
  gate_.begin(job.blocks.size());
  store_jobs_.emplace(*submitted, std::move(job));
}

void Scheduler::on_store_done(const StoreJob& job, const Completion& completion) {
  gate_.end(job.blocks.size());
  for (const auto& block : job.blocks) {
    storing_[block.target.group.value].erase(block.target.block);
  }
  if (!completion.all_ok()) {
    ipc::log_debug("scheduler: store: {}", completion.message);
    gate_.on_failed(ipc::MonotonicClock::now());
  }
  if (job.era == era_) {
    for (std::size_t i = job.blocks.size(); i-- > 0;) {
      const PagedCache::Unstored& held = job.blocks[i];
      if (i < completion.results.size() && completion.results[i] == 0) {
        cache_.mark_stored(held.target.group, held.block);
      }
      if (job.evicting) {
        --writing_back_[held.target.group.value];
        cache_.release_as_oldest(held.target.group, held.block);
      } else {
        cache_.release(held.target.group, held.block);
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
    PagedCache::Unstored block;
    block.target = {evicted.group, evicted.hash, evicted.before};
    block.block = evicted.block;
    if (!is_storing(block.target)) found.push_back(block);
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
