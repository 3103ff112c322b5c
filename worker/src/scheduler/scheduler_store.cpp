// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/worker/store_end.hpp"
#include "scheduler/scheduler.hpp"

#include <algorithm>
#include <utility>

/// To host memory: what the write policy wants there, as far as the way is free.
namespace kvferry::worker {
namespace {

/// Of the device's blocks, the part that may be offered without an answer: one in so many.
constexpr std::uint32_t kOfferedUnanswered = 8;
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

// An offer would be told that it is there already, which it is not if that store fails.
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
  const std::size_t most = std::max<std::size_t>(1, cache_.block_count() / kOfferedUnanswered);
  if (const auto may = pace_.admit(*client_, PagedCache::count_blocks(units), most); !may) {
    ipc::log_debug("scheduler: store: {}", may.error().to_string());
    if (may.error().code == ipc::ErrorCode::kTimeout) do_without_offload();
    return;
  }
  std::vector<StoreTarget> targets;
  std::vector<StoreItem> items;
  targets.reserve(units.size());
  for (const PagedCache::Unstored& unit : units) {
    std::uint32_t position = unit.position;
    for (const ipc::BlockId block : unit.blocks) {
      items.push_back(
          {unit.target.group, block, targets.size(), position++ % cache_.units().blocks()});
    }
    targets.push_back(unit.target);
  }
  const auto submitted = client_->offer_store(targets, items);
  if (!submitted) {
    ipc::log_debug("scheduler: store not sent: {}", submitted.error().to_string());
    return;
  }
  // The copy reads these blocks: they are not handed out again before it has ended.
  for (const PagedCache::Unstored& unit : units) {
    const ipc::GroupId group = unit.target.group;
    storing_[group.value].insert(unit.target.block);
    for (const ipc::BlockId block : unit.blocks) cache_.acquire(group, block);
    if (evicting) writing_back_[group.value] += unit.blocks.size();
  }
  gate_.begin(items.size());
  store_jobs_.emplace(*submitted, StoreJob{era_, std::move(units), evicting});
}

void Scheduler::on_store_done(const StoreJob& job, const Completion& completion) {
  gate_.end(PagedCache::count_blocks(job.units));
  std::size_t full = 0;
  bool failed = false;
  std::size_t item = 0;
  for (const PagedCache::Unstored& unit : job.units) {
    storing_[unit.target.group.value].erase(unit.target.block);
    const StoreEnd end = end_of_store(completion, item, unit.blocks.size());
    item += unit.blocks.size();
    failed = failed || end == StoreEnd::kFailed;
    if (end == StoreEnd::kNoRoom) full += unit.blocks.size();
    if (job.era != era_) continue;
    if (end == StoreEnd::kThere) note_there(unit);
    if (end != StoreEnd::kStored) continue;
    cache_.mark_stored(unit);
    lacking_.forget(unit.target.group, unit.target.block, unit.target.parts);
  }
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  gate_.on_full(full, now);
  if (failed) {
    ipc::log_debug("scheduler: store: {}", completion.message);
    gate_.on_failed(now);
  }
  if (job.era == era_) {
    for (std::size_t u = job.units.size(); u-- > 0;) {
      const ipc::GroupId group = job.units[u].target.group;
      const std::vector<ipc::BlockId>& blocks = job.units[u].blocks;
      for (std::size_t i = blocks.size(); i-- > 0;) {
        if (job.evicting) {
          --writing_back_[group.value];
          cache_.release_as_oldest(group, blocks[i]);
        } else {
          cache_.release(group, blocks[i]);
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
