// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/prefix_units.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/index/prefix_rules.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::worker {

using ipc::Digest;
using ipc::GroupId;
using ipc::HitRule;

PrefixUnits::PrefixUnits(StoreUnits units,
                         std::span<const ipc::GroupSpec> groups,
                         std::span<const Digest> hashes,
                         IsThere is_there)
    : units_(units),
      groups_(groups),
      hashes_(hashes),
      is_there_(std::move(is_there)),
      ends_(groups.size() * hashes.size()) {}

std::size_t PrefixUnits::end_of_unit(std::size_t position) const {
  const std::size_t unit = units_.blocks();
  return std::min((position / unit + 1) * unit, hashes_.size());
}

std::uint32_t PrefixUnits::look(GroupId group, std::uint32_t position) const {
  const std::uint32_t part = position % units_.blocks();
  const auto most = static_cast<std::uint32_t>(end_of_unit(position));
  const auto is_there = [&](std::uint32_t end) {
    return is_there_(group, UnitPart{hashes_[end - 1], part});
  };
  switch (groups_[group.value].rule) {
    case HitRule::kFull:
      // A unit has all blocks up to its end: the longest one serves most of the others.
      for (std::uint32_t end = most; end > position; --end) {
        if (is_there(end)) return end;
      }
      return 0;
    case HitRule::kSlidingWindow:
      // What ends soon behind it is the likeliest to reach back to it.
      for (std::uint32_t end = position + 1; end <= most; ++end) {
        if (is_there(end)) return end;
      }
      return 0;
    case HitRule::kLastState: return is_there(position + 1) ? position + 1 : 0;
  }
  return 0;
}

std::optional<UnitPart> PrefixUnits::find(GroupId group, std::uint32_t position) {
  KVFERRY_CHECK(group.value < groups_.size() && position < hashes_.size(),
                "a look for a block that the prefix does not have");
  const std::size_t first = std::size_t{group.value} * hashes_.size();
  std::optional<std::uint32_t>& end = ends_[first + position];
  if (!end) {
    end = look(group, position);
    // The others of the unit are where this one is; without one, what would hold them would hold
    // this one.
    if (groups_[group.value].rule == HitRule::kFull) {
      const std::size_t last = *end > 0 ? *end : end_of_unit(position);
      for (std::size_t other = position + std::size_t{1}; other < last; ++other) {
        if (!ends_[first + other]) ends_[first + other] = *end;
      }
    }
  }
  if (*end == 0) return std::nullopt;
  return UnitPart{hashes_[*end - 1], position % units_.blocks()};
}

std::vector<std::vector<Digest>> PrefixUnits::chains(std::uint32_t blocks) {
  const std::vector<Digest> natural = units_.keys(hashes_.first(blocks));
  std::vector<std::vector<Digest>> chains;
  if (units_.blocks() == 1 || natural.empty()) {
    chains.push_back(natural);
    return chains;
  }
  const auto add = [&chains](std::vector<Digest> chain) {
    if (std::find(chains.begin(), chains.end(), chain) == chains.end()) {
      chains.push_back(std::move(chain));
    }
  };
  for (std::uint32_t group = 0; group < groups_.size(); ++group) {
    std::vector<Digest> chain = natural;
    const std::vector<Row> rows = rows_of(GroupId{group}, blocks);
    for (const Row& row : rows) chain[row.unit] = row.key;
    add(chain);
    // Beside the unit that the prefix goes on with, what continues the same ones before it: a chain
    // says of each unit which one it follows.
    for (const Row& row : rows) {
      if (chain[row.unit] == row.key) continue;
      std::vector<Digest> other(chain.begin(),
                                chain.begin() + static_cast<std::ptrdiff_t>(row.unit));
      other.push_back(row.key);
      add(std::move(other));
    }
  }
  return chains;
}

std::vector<PrefixUnits::Row> PrefixUnits::rows_of(GroupId group, std::uint32_t blocks) {
  const ipc::GroupSpec& spec = groups_[group.value];
  std::vector<Row> rows;
  for (std::uint32_t i = blocks - ipc::blocks_needed({spec.rule, spec.window_blocks}, blocks);
       i < blocks; ++i) {
    const auto place = find(group, i);
    if (!place) continue;
    const Row row{i / units_.blocks(), place->key};
    if (std::find(rows.begin(), rows.end(), row) == rows.end()) rows.push_back(row);
  }
  return rows;
}

Digest LackingParts::name_of(GroupId group, const Digest& key) {
  return Digest::from_words(key.high() ^ ((group.value + 1ULL) * 0x9E3779B97F4A7C15ULL), key.low());
}

void LackingParts::note(GroupId group, const UnitPart& place, std::uint8_t result) {
  if (result != static_cast<std::uint8_t>(ipc::ErrorCode::kNotFound)) return;
  if (units_.blocks() == 1 || groups_[group.value].rule != HitRule::kSlidingWindow) return;
  if (lacking_.size() >= kMost) lacking_.clear();
  lacking_[name_of(group, place.key)] |= std::uint64_t{1} << place.part;
}

bool LackingParts::has(GroupId group, const UnitPart& place) const {
  if (lacking_.empty()) return false;
  const auto found = lacking_.find(name_of(group, place.key));
  return found != lacking_.end() && ((found->second >> place.part) & 1U) != 0;
}

void LackingParts::forget(GroupId group, const Digest& key, std::uint64_t parts) {
  const auto found = lacking_.find(name_of(group, key));
  if (found != lacking_.end() && (found->second &= ~parts) == 0) lacking_.erase(found);
}

std::uint64_t parts_shown(const ipc::GroupSpec& group, std::uint32_t part) noexcept {
  return group.rule == HitRule::kFull ? UINT64_MAX : std::uint64_t{1} << part;
}

std::vector<UnitStore> units_to_store(const StoreUnits& units,
                                      std::span<const ipc::GroupSpec> groups,
                                      std::span<const Digest> hashes,
                                      std::span<const PrefixBlock> held) {
  const std::uint32_t size = units.blocks();
  std::vector<UnitStore> stores;
  for (std::size_t first = 0; first < held.size();) {
    const PrefixBlock& block = held[first];
    const HitRule rule = groups[block.group.value].rule;
    // A row of one unit's blocks.
    std::size_t end = first + 1;
    while (rule != HitRule::kLastState && end < held.size() && held[end].group == block.group &&
           held[end].position < hashes.size() && held[end].position == held[end - 1].position + 1 &&
           held[end].position % size != 0) {
      ++end;
    }
    const std::size_t row = std::exchange(first, end);
    const std::uint32_t last = held[end - 1].position;
    if (last >= hashes.size()) continue;
    const bool all = block.position % size == 0 &&
                     (last % size == size - 1 || last + std::size_t{1} == hashes.size());
    if (rule == HitRule::kFull && !all) continue;
    UnitStore store;
    store.group = block.group;
    store.key = hashes[last];
    const std::uint32_t begin = block.position / size * size;
    if (begin > 0) store.before = hashes[begin - 1];
    for (std::size_t i = row; i < end; ++i) {
      store.parts |= std::uint64_t{1} << (held[i].position % size);
      store.blocks.push_back(i);
    }
    stores.push_back(std::move(store));
  }
  return stores;
}

}  // namespace kvferry::worker
