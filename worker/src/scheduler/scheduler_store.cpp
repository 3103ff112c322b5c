// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/worker/store_end.hpp"
#include "scheduler/scheduler.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

/// To host memory: what the write policy wants there, as far as the way is free.
namespace kvferry::worker {
namespace {

/// Of the blocks of the smallest group, the part that may be offered without an answer: one in so
/// many.
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
  std::vector<PagedCache::Unstored> found =
      cache_.unstored(sequence, gate_.room(now), [this, now](const StoreTarget& target) {
        return storing_.has(target.group, target.block, now);
      });
  if (found.empty()) return;
  PagedCache::keep_first(found, gate_.admit(PagedCache::count_blocks(found), now));
  if (!found.empty()) store(std::move(found), false);
}

bool Scheduler::is_writing_back() const {
  return std::any_of(writing_back_.begin(), writing_back_.end(),
                     [](std::uint64_t blocks) { return blocks > 0; });
}

bool Scheduler::manager_answers() {
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  if (now < no_offload_before_) return false;
  const auto since = client_->unanswered_since();
  if (!since) return true;
  const ipc::TimePoint overdue = *since + OfferPace::kAnswerTime;
  if (now >= overdue) return false;
  loop_.cancel(answer_timer_);
  answer_timer_ = loop_.at(overdue, [this, alive = alive_] {
    if (*alive) pump_later();
  });
  return true;
}

void Scheduler::note_there(const PagedCache::Unstored& unit) {
  lacking_.forget(unit.target.group, unit.target.block, unit.target.parts);
  cache_.mark_stored(unit);
}

void Scheduler::store(std::vector<PagedCache::Unstored> units, bool evicting) {
  if (cache_.units().blocks() == 1) {
    // Of larger ones the table does not say which parts they have.
    std::erase_if(units, [this](const PagedCache::Unstored& unit) {
      const bool is_there =
          client_->presence(unit.target.group, unit.target.block) == Presence::kHit;
      if (is_there) note_there(unit);
      return is_there;
    });
  }
  const std::size_t most = std::max<std::size_t>(1, cache_.least_blocks() / kOfferedUnanswered);
  while (!units.empty()) {
    std::vector<PagedCache::Unstored> next = take_offer(units, most);
    if (const auto may = pace_.admit(*client_, PagedCache::count_blocks(next), most); !may) {
      ipc::log_debug("scheduler: store: {}", may.error().to_string());
      if (may.error().code == ipc::ErrorCode::kTimeout) do_without_offload();
      return;
    }
    if (!offer(std::move(next), evicting)) return;
  }
}

bool Scheduler::offer(std::vector<PagedCache::Unstored> units, bool evicting) {
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
    return false;
  }
  // The copy reads these blocks: they are not handed out again before it has ended.
  for (const PagedCache::Unstored& unit : units) {
    const ipc::GroupId group = unit.target.group;
    storing_.begin(group, unit.target.block);
    for (const ipc::BlockId block : unit.blocks) cache_.acquire(group, block);
    if (evicting) writing_back_[group.value] += unit.blocks.size();
  }
  gate_.begin(items.size());
  store_jobs_.emplace(*submitted, StoreJob{era_, std::move(units), evicting});
  return true;
}

void Scheduler::on_store_done(const StoreJob& job, const Completion& completion) {
  gate_.end(PagedCache::count_blocks(job.units));
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  std::size_t full = 0;
  bool failed = false;
  std::size_t item = 0;
  for (const PagedCache::Unstored& unit : job.units) {
    const StoreEnd end = end_of_store(completion, item, unit.blocks.size());
    storing_.end(unit.target.group, unit.target.block, end, now);
    item += unit.blocks.size();
    failed = failed || end == StoreEnd::kFailed;
    if (end == StoreEnd::kNoRoom) full += unit.blocks.size();
    if (job.era != era_) continue;
    if (end == StoreEnd::kStored || end == StoreEnd::kThere) note_there(unit);
  }
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
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  const std::size_t most = std::min({blocks.size(), kWrittenAtOnce, gate_.room(now)});
  std::vector<PagedCache::Unstored> found;
  found.reserve(most);
  for (const EvictedBlock& evicted : std::span(blocks).first(most)) {
    PagedCache::Unstored unit;  // Of one block: larger ones do not go with write-back.
    unit.target = {evicted.group, evicted.hash, evicted.before};
    unit.blocks = {evicted.block};
    if (!storing_.has(evicted.group, evicted.hash, now)) found.push_back(std::move(unit));
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
  const bool comes = is_writing_back() && manager_answers();
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
