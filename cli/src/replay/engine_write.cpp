// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "replay/engine.hpp"

#include <algorithm>
#include <utility>

/// To host memory: what the write policy wants there, as far as the way is free.
namespace kvferry::cli {
namespace {

using ipc::BlockId;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kReserveTime = 1s;
/// Of the blocks of a group, the part that is written back ahead of its eviction: one in so many.
constexpr std::uint64_t kAheadShare = 8;
constexpr std::size_t kMostWrittenBack = 256;

}  // namespace

void Engine::store_blocks(const Attempt& attempt) {
  if (attempt.era != era_) return;
  std::vector<HeldBlock> sources;
  for (const HeldBlock& held : attempt.blocks) {
    const GroupIndex& group = index_of(held.group);
    const bool found = held.source == BlockSource::kDevice;
    if (!group.is_indexed(held.block) || (!held.announced && !found)) continue;
    const bool wanted = found ? write_policy_.on_hit(held.group, held.hash)
                              : write_policy_.on_filled(held.group, held.hash);
    if (wanted && !group.is_stored(held.block) && !is_storing(held)) sources.push_back(held);
  }
  if (sources.empty() || !offload_usable()) return;
  const std::size_t admitted = gate_.admit(sources.size(), ipc::MonotonicClock::now());
  if (admitted < sources.size()) {
    std::stable_sort(sources.begin(), sources.end(), [](const HeldBlock& a, const HeldBlock& b) {
      return a.position < b.position;
    });
    sources.resize(admitted);
  }
  if (!sources.empty()) store(std::move(sources), false);
}

// A reservation would say of it that it is there already, which it is not if that store fails.
bool Engine::is_storing(const HeldBlock& held) const {
  return storing_[held.group.value].contains(held.hash);
}

void Engine::store(std::vector<HeldBlock> sources, bool evicting) {
  std::vector<worker::StoreTarget> targets;
  targets.reserve(sources.size());
  for (const HeldBlock& held : sources) targets.push_back({held.group, held.hash, held.before});
  const auto slots = client_->reserve_store(targets, ipc::Deadline::after(kReserveTime));
  if (!slots || slots->size() != targets.size()) {
    if (!slots) ipc::log_debug("reserve: {}", slots.error().to_string());
    return;
  }
  StoreJob job;
  job.era = era_;
  job.evicting = evicting;
  std::vector<worker::StoreItem> items;
  std::size_t full = 0;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const HeldBlock& held = sources[i];
    switch ((*slots)[i].outcome) {
      case worker::Reservation::kReserved:
        items.push_back(worker::StoreItem{held.group, held.block, (*slots)[i].slot});
        job.blocks.push_back(held);
        break;
      case worker::Reservation::kAlreadyThere:
        ++counters_.already_stored;
        index_of(held.group).mark_stored(held.block);
        break;
      case worker::Reservation::kFull: ++full; break;
    }
  }
  counters_.host_full += full;
  gate_.on_full(full, ipc::MonotonicClock::now());
  if (items.empty()) return;
  const auto submitted = client_->submit_store(items);
  if (!submitted) {
    ipc::log_debug("store not sent: {}", submitted.error().to_string());
    std::vector<std::uint64_t> reserved;
    reserved.reserve(items.size());
    for (const worker::StoreItem& item : items) reserved.push_back(item.slot);
    if (const auto given_up = client_->abandon_store(reserved); !given_up) {
      ipc::log_debug("reservations not given up: {}", given_up.error().to_string());
    }
    return;
  }
  // The copy reads these blocks: they are not handed out again before it has ended.
  for (const HeldBlock& held : job.blocks) {
    index_of(held.group).acquire(held.block);
    storing_[held.group.value].insert(held.hash);
    if (evicting) ++writing_back_[held.group.value];
  }
  gate_.begin(job.blocks.size());
  store_jobs_.emplace(*submitted, std::move(job));
}

void Engine::on_store_done(StoreJob job, const worker::Completion& completion) {
  gate_.end(job.blocks.size());
  counters_.bytes_to_host += completion.bytes;
  if (!completion.all_ok()) {
    ++counters_.failed_jobs;
    ipc::log_debug("store: {}", completion.message);
    gate_.on_failed(ipc::MonotonicClock::now());
  }
  for (const HeldBlock& held : job.blocks) storing_[held.group.value].erase(held.hash);
  for (std::size_t i = 0; i < job.blocks.size(); ++i) {
    const bool stored = i < completion.results.size() && completion.results[i] == 0;
    if (stored) ++counters_.stores;
    if (stored && job.evicting) ++counters_.written_back;
    if (job.era != era_) continue;
    const HeldBlock& held = job.blocks[i];
    const bool same = index_of(held.group).is_indexed(held.block);
    if (stored && same) index_of(held.group).mark_stored(held.block);
  }
  if (job.era == era_) {
    // Deeper blocks go first, so that they are the first to be evicted; those written back keep
    // their order.
    for (std::size_t i = job.blocks.size(); i-- > 0;) {
      const HeldBlock& held = job.blocks[i];
      if (job.evicting) {
        --writing_back_[held.group.value];
        index_of(held.group).release_as_oldest(held.block);
      } else {
        index_of(held.group).release(held.block);
      }
    }
  }
  pump_later();
}

void Engine::write_back(const std::vector<worker::EvictedBlock>& blocks) {
  if (blocks.empty() || !offload_usable()) return;
  const std::size_t most =
      std::min({blocks.size(), kMostWrittenBack, gate_.room(ipc::MonotonicClock::now())});
  std::vector<HeldBlock> sources;
  sources.reserve(most);
  for (const worker::EvictedBlock& evicted : std::span(blocks).first(most)) {
    HeldBlock held;
    held.group = evicted.group;
    held.block = evicted.block;
    held.hash = evicted.hash;
    held.before = evicted.before;
    if (!is_storing(held)) sources.push_back(held);
  }
  if (!sources.empty()) store(std::move(sources), true);
}

bool Engine::make_room(std::size_t request,
                       const PrefixPlan& plan,
                       const std::vector<ipc::Digest>& hashes,
                       std::uint32_t output_blocks) {
  if (write_policy_.mode() != worker::WriteMode::kWriteBack) return true;
  std::vector<std::uint64_t> needed(index_.size());
  for (std::size_t g = 0; g < index_.size(); ++g) {
    if (options_.geometry.groups[g].rule == ipc::HitRule::kFull) needed[g] = output_blocks;
  }
  // What the request finds is no victim; held, it is not taken for one.
  std::vector<std::pair<ipc::GroupId, BlockId>> hits;
  for (const worker::PlannedBlock& planned : plan.blocks) {
    if (planned.source != BlockSource::kDevice) {
      ++needed[planned.group.value];
      continue;
    }
    const auto found = index_of(planned.group).find(hashes[planned.position]);
    KVFERRY_CHECK(found.has_value(), "a planned device hit is gone");
    index_of(planned.group).acquire(found->block);
    hits.emplace_back(planned.group, found->block);
  }
  // The time of each request counts from when it is the first.
  if (std::exchange(room_wanted_for_, request) != request) room_wanted_since_.reset();
  const bool made = room_is_made(needed);
  for (std::size_t i = hits.size(); i-- > 0;) index_of(hits[i].first).release(hits[i].second);
  return made;
}

bool Engine::room_is_made(const std::vector<std::uint64_t>& needed) {
  const worker::WriteBackPlan plan =
      worker::plan_write_back(index_, needed, writing_back_, write_policy_);
  if (!plan.waits) {
    room_wanted_since_.reset();
    return true;
  }
  write_back(plan.stores);
  for (std::size_t g = 0; g < index_.size(); ++g) {
    if (needed[g] > index_[g].available()) return false;  // It is being read: nobody gets it.
  }
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  const bool comes = std::any_of(writing_back_.begin(), writing_back_.end(),
                                 [](std::uint64_t blocks) { return blocks > 0; });
  if (comes && !room_wanted_since_) {
    room_wanted_since_ = now;
    ++counters_.room_waits;
  }
  if (comes && now < *room_wanted_since_ + options_.tier.write_back_wait) {
    loop_.cancel(room_timer_);
    room_timer_ =
        loop_.at(*room_wanted_since_ + options_.tier.write_back_wait, [this] { pump_later(); });
    return false;
  }
  room_wanted_since_.reset();
  counters_.evicted_unstored += worker::count_lost(index_, needed, write_policy_);
  return true;
}

void Engine::write_back_ahead() {
  if (write_policy_.mode() != worker::WriteMode::kWriteBack || index_.empty()) return;
  std::vector<std::uint64_t> soon;
  for (const GroupIndex& group : index_) soon.push_back(group.block_count() / kAheadShare);
  write_back(worker::plan_write_back(index_, soon, writing_back_, write_policy_).stores);
}

void Engine::note_counts() {
  counters_.gate = gate_.counts();
  counters_.choice = choice_.counts();
  if (prefetcher_) counters_.prefetch = prefetcher_->counts();
  counters_.load_bytes_per_s = choice_.bytes_per_second();
  counters_.compute_tokens_per_s = choice_.tokens_per_second();
}

}  // namespace kvferry::cli
