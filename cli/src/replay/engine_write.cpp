// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/worker/store_end.hpp"
#include "replay/engine.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

/// To host memory: what the write policy wants there, as far as the way is free.
namespace kvferry::cli {
namespace {

using ipc::BlockId;
/// Of the blocks of the smallest group, the part that may be offered without an answer: one in so
/// many.
constexpr std::uint64_t kOfferedUnanswered = 8;
/// Of the blocks of a group, the part that is written back ahead of its eviction: one in so many.
constexpr std::uint64_t kAheadShare = 8;
constexpr std::size_t kMostWrittenBack = 256;

template <typename Units> std::size_t count_blocks(const Units& units) {
  std::size_t blocks = 0;
  for (const auto& unit : units) blocks += unit.blocks.size();
  return blocks;
}

}  // namespace

void Engine::store_blocks(const Attempt& attempt) {
  if (attempt.era != era_) return;
  std::vector<StoredUnit> units = units_wanted(attempt);
  if (units.empty() || !offload_usable()) return;
  const std::size_t wanted = count_blocks(units);
  const std::size_t admitted = gate_.admit(wanted, ipc::MonotonicClock::now());
  if (admitted < wanted) {
    std::stable_sort(units.begin(), units.end(), [](const StoredUnit& a, const StoredUnit& b) {
      return a.blocks.front().position < b.blocks.front().position;
    });
  }
  std::size_t blocks = 0;
  const auto too_much = std::find_if(units.begin(), units.end(), [&](const StoredUnit& unit) {
    return (blocks += unit.blocks.size()) > admitted;
  });
  units.erase(too_much, units.end());
  if (!units.empty()) store(std::move(units), false);
}

std::vector<Engine::StoredUnit> Engine::units_wanted(const Attempt& attempt) {
  const std::vector<ipc::Digest>& hashes = hashes_of(attempt.request);
  // A last block that is not full is nobody else's: as part of a unit it would make that useless.
  const std::size_t end =
      units_.blocks() == 1 ? hashes.size() : whole_blocks_of(requests_[attempt.request]);
  std::vector<worker::PrefixBlock> places;
  std::vector<HeldBlock> held;
  std::vector<bool> own;  // Of each: ours to store, not only what a unit needs beside it.
  for (const HeldBlock& block : attempt.blocks) {
    const bool found = block.source == BlockSource::kDevice;
    const bool is_own = index_of(block.group).is_indexed(block.block) && (block.announced || found);
    HeldBlock source = block;
    if (!is_own) {
      // Others had computed it before: theirs is the one that is known to hold it.
      const auto theirs = index_of(block.group).find(block.hash);
      if (!theirs || theirs->state != GroupIndex::State::kValid) continue;
      source.block = theirs->block;
    }
    own.push_back(is_own);
    places.push_back({block.group, block.position});
    held.push_back(source);
  }
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  std::vector<StoredUnit> units;
  for (const worker::UnitStore& made : worker::units_to_store(
           units_, options_.geometry.groups, std::span(hashes).first(end), places)) {
    if (std::none_of(made.blocks.begin(), made.blocks.end(),
                     [&own](std::size_t i) { return own[i]; })) {
      continue;
    }
    const bool found = std::all_of(made.blocks.begin(), made.blocks.end(), [&](std::size_t i) {
      return held[i].source == BlockSource::kDevice;
    });
    const bool wanted = found ? write_policy_.on_hit(made.group, made.key)
                              : write_policy_.on_filled(made.group, made.key);
    if (!wanted || (made.parts & ~index_of(made.group).stored_parts(made.key)) == 0) continue;
    if (storing_.has(made.group, made.key, now)) continue;
    StoredUnit& unit = units.emplace_back();
    unit.target = {made.group, made.key, made.before};
    if (units_.blocks() > 1) unit.target.parts = made.parts;
    for (const std::size_t i : made.blocks) unit.blocks.push_back(held[i]);
  }
  return units;
}

// What a manager that stands still was given would be waited for in vain.
bool Engine::manager_answers() {
  const auto since = client_->unanswered_since();
  if (!since) return true;
  const ipc::TimePoint overdue = *since + worker::OfferPace::kAnswerTime;
  if (ipc::MonotonicClock::now() >= overdue) return false;
  loop_.cancel(answer_timer_);
  answer_timer_ = loop_.at(overdue, [this] { pump_later(); });
  return true;
}

bool Engine::manager_serves() {
  if (client_ == nullptr || !client_->state().manager_connected) return false;
  const auto since = client_->unanswered_since();
  return !since || ipc::MonotonicClock::now() < *since + worker::OfferPace::kAnswerTime;
}

void Engine::note_stored(const StoredUnit& unit) {
  lacking_.forget(unit.target.group, unit.target.block, unit.target.parts);
  GroupIndex& group = index_of(unit.target.group);
  // Without its name a block may be of before the weights changed, and another one have the name.
  if (!group.is_indexed(unit.blocks.back().block)) return;
  group.mark_stored(unit.target.block, units_.blocks() == 1 ? 1 : unit.target.parts);
}

void Engine::store(std::vector<StoredUnit> units, bool evicting) {
  if (units_.blocks() == 1) {
    // Of larger ones the table does not say which parts they have.
    std::erase_if(units, [this](const StoredUnit& unit) {
      const bool is_there =
          client_->presence(unit.target.group, unit.target.block) == worker::Presence::kHit;
      if (is_there) {
        ++counters_.already_stored;
        note_stored(unit);
      }
      return is_there;
    });
  }
  std::size_t least = index_.front().block_count();
  for (const GroupIndex& group : index_) least = std::min<std::size_t>(least, group.block_count());
  const std::size_t most = std::max<std::size_t>(1, least / kOfferedUnanswered);
  while (!units.empty()) {
    std::vector<StoredUnit> next = worker::take_offer(units, most);
    if (const auto may = pace_.admit(*client_, count_blocks(next), most); !may) {
      ipc::log_debug("store: {}", may.error().to_string());
      return;
    }
    if (!offer(std::move(next), evicting)) return;
  }
}

bool Engine::offer(std::vector<StoredUnit> units, bool evicting) {
  std::vector<worker::StoreTarget> targets;
  std::vector<worker::StoreItem> items;
  targets.reserve(units.size());
  for (const StoredUnit& unit : units) {
    for (const HeldBlock& held : unit.blocks) {
      items.push_back({held.group, held.block, targets.size(), held.position % units_.blocks()});
    }
    targets.push_back(unit.target);
  }
  const auto submitted = client_->offer_store(targets, items);
  if (!submitted) {
    ipc::log_debug("store not sent: {}", submitted.error().to_string());
    return false;
  }
  // The copy reads these blocks: they are not handed out again before it has ended.
  for (const StoredUnit& unit : units) {
    storing_.begin(unit.target.group, unit.target.block);
    for (const HeldBlock& held : unit.blocks) {
      index_of(held.group).acquire(held.block);
      if (evicting) ++writing_back_[held.group.value];
    }
  }
  gate_.begin(items.size());
  store_jobs_.emplace(*submitted, StoreJob{era_, std::move(units), evicting});
  return true;
}

void Engine::on_store_done(StoreJob job, const worker::Completion& completion) {
  gate_.end(count_blocks(job.units));
  counters_.bytes_to_host += completion.bytes;
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  std::size_t full = 0;
  bool failed = false;
  std::size_t item = 0;
  for (const StoredUnit& unit : job.units) {
    const std::size_t blocks = unit.blocks.size();
    const worker::StoreEnd end =
        worker::end_of_store(completion, std::exchange(item, item + blocks), blocks);
    storing_.end(unit.target.group, unit.target.block, end, now);
    switch (end) {
      case worker::StoreEnd::kStored:
        counters_.stores += blocks;
        if (job.evicting) counters_.written_back += blocks;
        if (job.era == era_) {
          note_stored(unit);
        } else {
          lacking_.forget(unit.target.group, unit.target.block, unit.target.parts);
        }
        break;
      case worker::StoreEnd::kThere:
        counters_.already_stored += blocks;
        if (job.era == era_) note_stored(unit);
        break;
      case worker::StoreEnd::kNoRoom: full += blocks; break;
      case worker::StoreEnd::kInUse: break;
      case worker::StoreEnd::kFailed: failed = true; break;
    }
  }
  counters_.host_full += full;
  gate_.on_full(full, now);
  if (failed) {
    ++counters_.failed_jobs;
    ipc::log_debug("store: {}", completion.message);
    gate_.on_failed(now);
  }
  if (job.era == era_) {
    // Deeper blocks go first, so that they are the first to be evicted; those written back keep
    // their order.
    for (std::size_t u = job.units.size(); u-- > 0;) {
      const std::vector<HeldBlock>& blocks = job.units[u].blocks;
      for (std::size_t i = blocks.size(); i-- > 0;) {
        const HeldBlock& held = blocks[i];
        if (job.evicting) {
          --writing_back_[held.group.value];
          index_of(held.group).release_as_oldest(held.block);
        } else {
          index_of(held.group).release(held.block);
        }
      }
    }
  }
  pump_later();
}

void Engine::write_back(const std::vector<worker::EvictedBlock>& blocks) {
  if (blocks.empty() || !offload_usable()) return;
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  const std::size_t most = std::min({blocks.size(), kMostWrittenBack, gate_.room(now)});
  std::vector<StoredUnit> units;  // Of one block each: check_unit_blocks().
  units.reserve(most);
  for (const worker::EvictedBlock& evicted : std::span(blocks).first(most)) {
    HeldBlock held;
    held.group = evicted.group;
    held.block = evicted.block;
    held.hash = evicted.hash;
    held.before = evicted.before;
    if (storing_.has(held.group, held.hash, now)) continue;
    units.push_back({{held.group, held.hash, held.before}, {held}});
  }
  if (!units.empty()) store(std::move(units), true);
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
                                 [](std::uint64_t blocks) { return blocks > 0; }) &&
                     manager_answers();
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
