// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "scheduler/paged_cache.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/model/block_key.hpp"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace kvferry::worker {

using ipc::BlockId;
using ipc::GroupId;
using ipc::HitRule;
using ipc::Status;

namespace {

std::uint32_t blocks_for(std::uint64_t tokens, std::uint32_t tokens_per_block) {
  return static_cast<std::uint32_t>((tokens + tokens_per_block - 1) / tokens_per_block);
}

/// The first position that a token in the block `last` still reads.
std::uint32_t first_needed(const ipc::GroupSpec& group, std::uint32_t last) {
  switch (group.rule) {
    case HitRule::kFull: return 0;
    case HitRule::kSlidingWindow:
      return last + 1 > group.window_blocks ? last + 1 - group.window_blocks : 0;
    case HitRule::kLastState: return last;
  }
  return 0;
}

}  // namespace

void hash_full_blocks(Sequence& sequence, std::uint32_t tokens_per_block) {
  const std::size_t full = sequence.tokens.size() / tokens_per_block;
  while (sequence.hashes.size() < full) {
    const std::size_t block = sequence.hashes.size();
    const ipc::Digest parent = block == 0 ? ipc::Digest{} : sequence.hashes.back();
    sequence.hashes.push_back(
        ipc::chain_block_hash(parent, sequence.tokens.data() + block * tokens_per_block,
                              tokens_per_block * sizeof(std::uint32_t)));
  }
}

void PagedCache::remake(std::span<const std::uint32_t> group_blocks) {
  index_.clear();
  for (const std::uint32_t blocks : group_blocks) index_.emplace_back(blocks);
}

bool PagedCache::has_counts(std::span<const std::uint32_t> group_blocks) const {
  return std::equal(
      index_.begin(), index_.end(), group_blocks.begin(), group_blocks.end(),
      [](const GroupIndex& group, std::uint32_t blocks) { return group.block_count() == blocks; });
}

void PagedCache::forget_contents() {
  for (GroupIndex& group : index_) group.forget_all();
}

Status PagedCache::check_fits(std::uint64_t tokens) const {
  const std::uint32_t length = blocks_for(tokens, geometry_.tokens_per_block);
  for (std::uint32_t g = 0; g < index_.size(); ++g) {
    const ipc::GroupSpec& group = geometry_.groups[g];
    const std::uint32_t needed = most_blocks_needed(group, length);
    if (needed <= index_[g].block_count()) continue;
    return KVFERRY_ERROR(kInvalidArgument,
                         "a sequence of {} tokens can need {} blocks of group '{}', the device has "
                         "{}: ask for fewer tokens, or start with more --gpu-blocks",
                         tokens, needed, group.name, index_[g].block_count());
  }
  return ipc::ok();
}

PrefixPlan PagedCache::plan(const Sequence& sequence, const SourceOf& in_host) const {
  const std::uint32_t length = blocks_for(sequence.length(), geometry_.tokens_per_block);
  const auto whole = static_cast<std::uint32_t>(sequence.hashes.size());
  return plan_prefix(geometry_.groups, length, whole, [&](GroupId group, std::uint32_t position) {
    if (position >= whole) return BlockSource::kNowhere;
    if (index_of(group).find(sequence.hashes[position])) return BlockSource::kDevice;
    return in_host(group, position);
  });
}

bool PagedCache::may_fit(const Sequence& sequence) const {
  const auto nowhere = [](GroupId, std::uint32_t) { return BlockSource::kNowhere; };
  return fits(plan(sequence, nowhere), sequence);
}

bool PagedCache::fits(const PrefixPlan& wanted, const Sequence& sequence) const {
  std::vector<std::uint32_t> needed(index_.size());
  for (const PlannedBlock& planned : wanted.blocks) {
    const GroupIndex& group = index_of(planned.group);
    if (planned.source == BlockSource::kDevice) {
      const auto found = group.find(sequence.hashes[planned.position]);
      if (found && group.references(found->block) > 0) continue;
    }
    ++needed[planned.group.value];
  }
  for (std::size_t g = 0; g < index_.size(); ++g) {
    if (needed[g] > index_[g].available()) return false;
  }
  return true;
}

PagedCache::Admission PagedCache::admit(Sequence& sequence,
                                        const SourceOf& in_host,
                                        std::vector<LoadItem>& loads) {
  const auto place_of = [&sequence](GroupId, std::uint32_t position) {
    return UnitPart{sequence.hashes[position], 0};
  };
  return admit(sequence, plan(sequence, in_host), place_of, loads);
}

PagedCache::Admission PagedCache::admit(Sequence& sequence,
                                        const PrefixPlan& wanted,
                                        const PlaceOf& place_of,
                                        std::vector<LoadItem>& loads) {
  if (!fits(wanted, sequence)) return Admission::kNoRoom;
  sequence.table.assign(index_.size(), {});
  // What is there is held first, so that making room for the rest does not evict it.
  for (const PlannedBlock& planned : wanted.blocks) {
    if (planned.source != BlockSource::kDevice) continue;
    GroupIndex& group = index_of(planned.group);
    const auto found = group.find(sequence.hashes[planned.position]);
    KVFERRY_CHECK(found.has_value(), "a planned device hit is gone");
    group.acquire(found->block);
    sequence.table[planned.group.value][planned.position] = {found->block, true, true};
  }
  for (const PlannedBlock& planned : wanted.blocks) {
    if (planned.source == BlockSource::kDevice) continue;
    const auto block = index_of(planned.group).allocate();
    KVFERRY_CHECK(block.has_value(), "the room that fits() saw is gone");
    sequence.table[planned.group.value][planned.position] = {*block, false};
    if (planned.source != BlockSource::kHost) continue;
    const UnitPart place = place_of(planned.group, planned.position);
    loads.push_back(LoadItem{planned.group, *block, place.key, place.part});
  }
  sequence.published = sequence.judged = sequence.settled = 0;
  sequence.computed = wanted.hit_blocks * geometry_.tokens_per_block;
  return loads.empty() ? Admission::kReady : Admission::kLoading;
}

std::uint32_t PagedCache::least_available() const {
  std::uint32_t least = UINT32_MAX;
  for (const GroupIndex& group : index_) least = std::min(least, group.available());
  return least;
}

bool PagedCache::extend(Sequence& sequence) {
  const std::uint32_t position = (sequence.length() - 1) / geometry_.tokens_per_block;
  for (std::uint32_t g = 0; g < index_.size(); ++g) {
    if (sequence.table[g].contains(position)) continue;
    const auto block = index_[g].allocate();
    if (!block) return false;
    sequence.table[g][position] = {*block, false};
  }
  return true;
}

void PagedCache::trim(Sequence& sequence) {
  const std::uint32_t last = (sequence.length() - 1) / geometry_.tokens_per_block;
  for (std::uint32_t g = 0; g < index_.size(); ++g) {
    const std::uint32_t needed = first_needed(geometry_.groups[g], last);
    auto& table = sequence.table[g];
    while (!table.empty() && table.begin()->first < needed) {
      index_[g].release(table.begin()->second.block);
      table.erase(table.begin());
    }
  }
}

bool PagedCache::publish(Sequence& sequence) {
  const std::uint32_t full = sequence.computed / geometry_.tokens_per_block;
  if (full == sequence.published) return false;
  for (std::uint32_t g = 0; g < index_.size(); ++g) {
    auto& table = sequence.table[g];
    for (auto next = table.lower_bound(sequence.published); next != table.end(); ++next) {
      auto& [position, held] = *next;
      if (position >= full) break;
      if (!held.indexed) publish(GroupId{g}, position, held, sequence);
    }
  }
  sequence.published = full;
  return true;
}

void PagedCache::publish(GroupId group,
                         std::uint32_t position,
                         TableBlock& held,
                         const Sequence& sequence) {
  // Another sequence may have been faster: then this block stays its own.
  const ipc::Digest before = position == 0 ? ipc::Digest{} : sequence.hashes[position - 1];
  held.indexed = index_of(group).announce(held.block, sequence.hashes[position], before);
  if (held.indexed) index_of(group).make_valid(held.block);
}

void PagedCache::publish_loaded(Sequence& sequence, std::span<const LoadItem> came) {
  std::vector<std::unordered_map<std::uint32_t, const LoadItem*>> by_block(index_.size());
  for (const LoadItem& item : came) by_block[item.group.value].emplace(item.block.value, &item);
  for (std::uint32_t g = 0; g < index_.size(); ++g) {
    for (auto& [position, held] : sequence.table[g]) {
      const auto found = by_block[g].find(held.block.value);
      if (found == by_block[g].end() || held.indexed) continue;
      publish(GroupId{g}, position, held, sequence);
      mark_loaded(GroupId{g}, {found->second->key, found->second->part});
    }
  }
}

void PagedCache::release(Sequence& sequence) {
  for (std::uint32_t g = 0; g < sequence.table.size(); ++g) {
    // Deeper blocks go first, so that they are the first to be evicted.
    for (auto held = sequence.table[g].rbegin(); held != sequence.table[g].rend(); ++held) {
      index_[g].release(held->second.block);
    }
  }
  sequence.table.clear();
  sequence.computed = 0;
}

bool PagedCache::may_end(const Sequence& sequence, std::size_t full) const {
  const std::uint32_t tokens = geometry_.tokens_per_block;
  const std::uint64_t computed = sequence.prompt_tokens + std::uint64_t{sequence.max_tokens} - 1;
  return full == sequence.prompt_tokens / tokens || full == computed / tokens;
}

std::size_t PagedCache::end_of_units(const Sequence& sequence) const {
  const std::size_t full =
      std::min<std::size_t>(sequence.computed / geometry_.tokens_per_block, sequence.hashes.size());
  // Not at the last token: then blocks that a window or a state needs there are gone.
  return may_end(sequence, full) ? full : full - full % units_.blocks();
}

std::uint32_t PagedCache::published_units(const Sequence& sequence, std::size_t blocks) const {
  // Before that a load may have to come, and what is a part of a unit now may be all of it later.
  const std::size_t known = std::min<std::size_t>(sequence.published, blocks);
  return static_cast<std::uint32_t>(known - known % units_.blocks());
}

std::vector<PagedCache::HeldUnit> PagedCache::held_units(const Sequence& sequence,
                                                         std::size_t from,
                                                         std::size_t to) const {
  std::vector<PrefixBlock> places;
  std::vector<BlockId> blocks;
  std::vector<const TableBlock*> held;
  for (std::uint32_t g = 0; g < sequence.table.size(); ++g) {
    const auto& table = sequence.table[g];
    for (auto next = table.lower_bound(static_cast<std::uint32_t>(from)); next != table.end();
         ++next) {
      const auto& [position, block] = *next;
      if (position >= to) break;
      BlockId source = block.block;
      if (!block.indexed) {
        // Another sequence was faster: what it made completes the unit.
        const auto others = index_[g].find(sequence.hashes[position]);
        if (!others || others->state != GroupIndex::State::kValid) continue;
        source = others->block;
      }
      places.push_back({GroupId{g}, position});
      blocks.push_back(source);
      held.push_back(&block);
    }
  }
  std::vector<HeldUnit> units;
  for (UnitStore& made :
       units_to_store(units_, geometry_.groups, std::span(sequence.hashes).first(to), places)) {
    const auto all = [&](auto is) {
      return std::all_of(made.blocks.begin(), made.blocks.end(), is);
    };
    if (all([&held](std::size_t i) { return !held[i]->indexed; })) continue;
    HeldUnit& unit = units.emplace_back();
    unit.first = places[made.blocks.front()].position;
    unit.last = places[made.blocks.back()].position;
    unit.found = all([&held](std::size_t i) { return held[i]->found; });
    for (const std::size_t i : made.blocks) unit.blocks.push_back(blocks[i]);
    unit.unit = std::move(made);
  }
  return units;
}

void PagedCache::judge(Sequence& sequence, WritePolicy& policy) const {
  const std::size_t end = end_of_units(sequence);
  for (const HeldUnit& held : held_units(sequence, sequence.judged, end)) {
    const GroupId group = held.unit.group;
    TableBlock& last = sequence.table[group.value].at(held.last);
    if (std::exchange(last.judged, true)) continue;
    last.wanted =
        held.found ? policy.on_hit(group, held.unit.key) : policy.on_filled(group, held.unit.key);
  }
  sequence.judged = std::max(sequence.judged, published_units(sequence, end));
}

std::vector<PagedCache::Ahead> PagedCache::take_ahead(const Sequence& sequence,
                                                      const PrefixPlan& wanted,
                                                      std::span<const std::uint64_t> held,
                                                      std::uint32_t share,
                                                      std::uint64_t spare) {
  std::vector<std::uint64_t> all(held.begin(), held.end());
  std::vector<std::uint64_t> taken(index_.size());
  for (const PlannedBlock& planned : wanted.blocks) {
    if (planned.source == BlockSource::kNowhere) continue;
    ++all[planned.group.value];
    ++taken[planned.group.value];
  }
  for (std::size_t g = 0; g < index_.size(); ++g) {
    if (all[g] > index_[g].block_count() / share || taken[g] + spare > index_[g].available()) {
      return {};
    }
  }
  std::vector<Ahead> blocks;
  // What is there is held first, so that making room for the rest does not evict it.
  for (const PlannedBlock& planned : wanted.blocks) {
    if (planned.source != BlockSource::kDevice) continue;
    const auto found = index_of(planned.group).find(sequence.hashes[planned.position]);
    KVFERRY_CHECK(found.has_value(), "a planned device hit is gone");
    acquire(planned.group, found->block);
    blocks.push_back({planned.group, found->block, planned.position, false});
  }
  for (const PlannedBlock& planned : wanted.blocks) {
    if (planned.source != BlockSource::kHost) continue;
    const auto block = index_of(planned.group).allocate();
    KVFERRY_CHECK(block.has_value(), "the room that was there is gone");
    blocks.push_back({planned.group, *block, planned.position, true});
  }
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const Ahead& a, const Ahead& b) { return a.position < b.position; });
  return blocks;
}

bool PagedCache::land_ahead(const Sequence& sequence, Ahead& block, const UnitPart& place) {
  block.loading = false;
  GroupIndex& group = index_of(block.group);
  const ipc::Digest before =
      block.position == 0 ? ipc::Digest{} : sequence.hashes[block.position - 1];
  if (!group.announce(block.block, sequence.hashes[block.position], before)) return false;
  group.make_valid(block.block);
  mark_loaded(block.group, place);
  return true;
}

WriteBackPlan PagedCache::plan_room(const Sequence& sequence,
                                    const PrefixPlan& wanted,
                                    std::uint64_t growth,
                                    std::span<const std::uint64_t> under_way,
                                    const WritePolicy& policy) {
  std::vector<std::uint64_t> needed(index_.size(), growth);
  // What the sequence finds is no victim; held, it is not taken for one.
  std::vector<std::pair<GroupId, BlockId>> hits;
  for (const PlannedBlock& planned : wanted.blocks) {
    if (planned.source != BlockSource::kDevice) {
      ++needed[planned.group.value];
      continue;
    }
    const auto found = index_of(planned.group).find(sequence.hashes[planned.position]);
    KVFERRY_CHECK(found.has_value(), "a planned device hit is gone");
    acquire(planned.group, found->block);
    hits.emplace_back(planned.group, found->block);
  }
  WriteBackPlan plan = plan_write_back(index_, needed, under_way, policy);
  for (std::size_t i = hits.size(); i-- > 0;) release(hits[i].first, hits[i].second);
  return plan;
}

WriteBackPlan PagedCache::plan_ahead(std::uint32_t share,
                                     std::span<const std::uint64_t> under_way,
                                     const WritePolicy& policy) const {
  std::vector<std::uint64_t> needed;
  needed.reserve(index_.size());
  for (const GroupIndex& group : index_) needed.push_back(group.block_count() / share);
  return plan_write_back(index_, needed, under_way, policy);
}

std::vector<PagedCache::Unstored> PagedCache::unstored(
    Sequence& sequence,
    std::size_t most,
    const std::function<bool(const StoreTarget&)>& under_way) const {
  std::vector<Unstored> found;
  std::size_t blocks = 0;
  const std::size_t end = end_of_units(sequence);
  bool all_settled = true;
  std::size_t from = sequence.settled;
  // A unit of all groups after the other: what is found first are beginnings of the prefix.
  while (from < end && blocks <= most) {
    const std::size_t to = std::min<std::size_t>(from + units_.blocks(), end);
    for (HeldUnit& held : held_units(sequence, from, to)) {
      const GroupIndex& group = index_of(held.unit.group);
      if (!sequence.table[held.unit.group.value].at(held.last).wanted) continue;
      if ((held.unit.parts & ~group.stored_parts(held.unit.key)) == 0) continue;
      const bool known = std::all_of(held.blocks.begin(), held.blocks.end(),
                                     [&group](BlockId block) { return group.is_indexed(block); });
      if (!known) continue;
      all_settled = false;
      StoreTarget target{held.unit.group, held.unit.key, held.unit.before};
      if (units_.blocks() > 1) target.parts = held.unit.parts;
      if (under_way && under_way(target)) continue;
      blocks += held.blocks.size();
      found.push_back({target, std::move(held.blocks), held.first});
    }
    from = to;
    if (all_settled) sequence.settled = std::max(sequence.settled, published_units(sequence, to));
  }
  return found;
}

std::size_t PagedCache::count_blocks(std::span<const Unstored> units) {
  std::size_t blocks = 0;
  for (const Unstored& unit : units) blocks += unit.blocks.size();
  return blocks;
}

void PagedCache::keep_first(std::vector<Unstored>& units, std::size_t blocks) {
  if (count_blocks(units) <= blocks) return;
  std::stable_sort(units.begin(), units.end(),
                   [](const Unstored& a, const Unstored& b) { return a.position < b.position; });
  std::size_t kept = 0;
  const auto too_much = std::find_if(units.begin(), units.end(), [&](const Unstored& unit) {
    return (kept += unit.blocks.size()) > blocks;
  });
  units.erase(too_much, units.end());
}

void PagedCache::mark_stored(const Unstored& unit) {
  GroupIndex& group = index_of(unit.target.group);
  // Without its name a block may be of before the weights changed, and another one have the name.
  if (!group.is_indexed(unit.blocks.back())) return;
  group.mark_stored(unit.target.block, units_.blocks() == 1 ? 1 : unit.target.parts);
}

void PagedCache::mark_loaded(GroupId group, const UnitPart& place) {
  index_of(group).mark_stored(place.key, parts_shown(geometry_.groups[group.value], place.part));
}

void PagedCache::mark_not_found(GroupId group, const UnitPart& place) {
  index_of(group).forget_stored(place.key);
}

void PagedCache::acquire(GroupId group, BlockId block) { index_of(group).acquire(block); }
void PagedCache::release(GroupId group, BlockId block) { index_of(group).release(block); }
void PagedCache::release_as_oldest(GroupId group, BlockId block) {
  index_of(group).release_as_oldest(block);
}

}  // namespace kvferry::worker
