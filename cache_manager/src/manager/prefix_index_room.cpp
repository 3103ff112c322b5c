// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// How the prefix index makes room, and at whose cost.
#include "manager/prefix_index.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// Groups of a few models.
constexpr std::size_t kMostRecentShapes = 16;

}  // namespace

void PrefixIndex::note_shape(const SlabShape& shape) {
  if (!recent_.empty() && recent_.back() == shape) return;
  std::erase(recent_, shape);
  if (recent_.size() == kMostRecentShapes) recent_.erase(recent_.begin());
  recent_.push_back(shape);
}

HostBlockRef PrefixIndex::allocate(const SlabShape& shape,
                                   Extent& extent,
                                   NamespaceAccount* account) {
  NamespaceAccount& payer = account != nullptr ? *account : accounts_.nobody();
  if (!make_room_in(payer, shape, extent)) {
    ++payer.counters.refused_quota;
    return nullptr;
  }
  std::optional<HostSlot> slot = pool_.allocate(shape, extent);
  if (!slot && pool_.can_hold(shape)) {
    // For the whole batch at once: what was stored together is evicted together, and lies together.
    // Pages that another shape has given back hold more than that.
    const std::uint64_t most = (payer.limits().hard - payer.bytes()) / shape.block_bytes();
    const std::uint64_t wanted = std::min<std::uint64_t>(extent.left, most);
    std::uint64_t evicted = 0;
    while (evicted < wanted && !pool_.can_open(shape) && evict_for(shape, &payer, evicted)) {
      ++evicted;
    }
    if (evicted > 0) slot = pool_.allocate(shape, extent);
    while (!slot && evict_for(shape, &payer, evicted)) slot = pool_.allocate(shape, extent);
  }
  if (!slot) {
    ++payer.counters.refused_room;
    return nullptr;
  }
  note_shape(shape);
  extent.advance(*slot);
  return std::make_shared<const HostBlock>(pool_, *slot, /*is_doubted=*/false, &payer);
}

// Its own blocks go, whatever their shape: for the whole batch at once, as far as that fits at all.
bool PrefixIndex::make_room_in(NamespaceAccount& account,
                               const SlabShape& shape,
                               const Extent& extent) {
  const std::uint64_t bytes = shape.block_bytes();
  const std::uint64_t fits = account.limits().hard / std::max<std::uint64_t>(1, bytes);
  if (fits == 0) return false;
  if (account.has_room_for(bytes)) return true;
  const std::uint64_t wanted = std::min<std::uint64_t>(std::max(1U, extent.left), fits) * bytes;
  const auto may_evict = [this](EntryId id) { return is_evictable(*entries_[id]); };
  order_.end_retentions(now_());
  while (evicts_ && !account.has_room_for(wanted)) {
    const std::optional<EntryId> chosen = order_.evict(account.partition().id, may_evict);
    if (!chosen) break;
    evict_entry(*entries_[*chosen], &account);
  }
  return account.has_room_for(bytes);
}

std::size_t PrefixIndex::enforce_limits(std::size_t most) {
  std::size_t evicted = 0;
  const auto may_evict = [this](EntryId id) { return is_evictable(*entries_[id]); };
  for (const auto& [name, account] : accounts_.all()) {
    while (evicts_ && evicted < most && account->bytes() > account->limits().hard) {
      const std::optional<EntryId> chosen = order_.evict(account->partition().id, may_evict);
      if (!chosen) break;
      evict_entry(*entries_[*chosen], account.get());
      ++evicted;
    }
  }
  return evicted;
}

bool PrefixIndex::evict_ahead(const SlabShape& shape) { return evict_for(shape, nullptr, 0); }

bool PrefixIndex::evict_for(const SlabShape& shape,
                            const NamespaceAccount* account,
                            std::uint64_t evicted) {
  if (!evicts_) return false;
  order_.end_retentions(now_());
  Need need{shape, account, (evicted + 1) * shape.block_bytes()};
  const auto gives = [&](const Partition& partition) { return evict_of(partition, need); };
  if (first_of(excesses(need), gives)) return true;
  if (account == nullptr) return false;
  const Partition& own = account->partition();
  if (own.bytes + need.bytes > own.soft) return false;  // its own have been looked at
  need.is_level = true;
  return first_of(fullnesses(need), gives) || evict_of(own, need);
}

std::vector<PrefixIndex::Ranked> PrefixIndex::fullnesses(const Need& need) const {
  std::vector<Ranked> others;
  for (const auto& other : accounts_.partitions()) {
    const bool is_own = &need.account->partition() == other.get();
    if (is_own || other->soft == 0 || allowance(*other, need) == 0) continue;
    others.push_back({static_cast<double>(other->bytes) / static_cast<double>(other->soft),
                      others.size(), other.get()});
  }
  return others;
}

// The one that stores counts with what it wants to store.
std::vector<PrefixIndex::Ranked> PrefixIndex::excesses(const Need& need) const {
  std::vector<Ranked> above;
  for (const auto& partition : accounts_.partitions()) {
    const bool is_own = need.account != nullptr && &need.account->partition() == partition.get();
    const std::uint64_t bytes = partition->bytes + (is_own ? need.bytes : 0);
    if (bytes <= partition->soft) continue;
    above.push_back({static_cast<double>(bytes - partition->soft), above.size(), partition.get()});
  }
  return above;
}

// A heap: of a thousand tenants the first one nearly always gives.
bool PrefixIndex::first_of(std::vector<Ranked> partitions,
                           const std::function<bool(const Partition&)>& gives) {
  const auto is_later = [](const Ranked& a, const Ranked& b) {
    return a.rank != b.rank ? a.rank < b.rank : a.place > b.place;
  };
  std::make_heap(partitions.begin(), partitions.end(), is_later);
  while (!partitions.empty()) {
    std::pop_heap(partitions.begin(), partitions.end(), is_later);
    if (gives(*partitions.back().partition)) return true;
    partitions.pop_back();
  }
  return false;
}

std::uint64_t PrefixIndex::allowance(const Partition& partition, const Need& need) {
  const Partition* own = need.account == nullptr ? nullptr : &need.account->partition();
  if (&partition == own) return std::numeric_limits<std::uint64_t>::max();
  if (!need.is_level || partition.soft == 0) return partition.above_share();
  return above_level(partition, *own, own->bytes + need.bytes);
}

// As much of its share as the other one then has of its own stays.
std::uint64_t PrefixIndex::above_level(const Partition& partition,
                                       const Partition& other,
                                       std::uint64_t bytes) {
  const double part = static_cast<double>(bytes) / static_cast<double>(other.soft);
  const double spare =
      static_cast<double>(partition.bytes) - part * static_cast<double>(partition.soft);
  return spare <= 0 ? 0 : static_cast<std::uint64_t>(spare);
}

// The policy's choice if it has the wanted shape; else the whole slab that it lies in, because only
// whole slabs change their shape. Some other slab may then hold what a block of that one continued:
// nothing finds that any more, and it goes in its turn.
bool PrefixIndex::evict_of(const Partition& partition, const Need& need) {
  const std::uint64_t most = allowance(partition, need);
  // Nor is it worth a look at all of its blocks whether a slab of another shape is as good as
  // empty.
  if (most < need.shape.block_bytes()) return false;
  std::unordered_map<std::uint32_t, bool> slabs;  // Of other shapes: whether they can go.
  const auto may_evict = [&](EntryId id) {
    const Entry& entry = *entries_[id];
    if (!is_evictable(entry)) return false;
    if (pool_.shape(entry.block->slot()) == need.shape) return true;
    const std::uint32_t slab = entry.block->slot().slab;
    const auto [known, is_new] = slabs.try_emplace(slab, false);
    if (is_new) known->second = can_evict_slab(slab, need);
    return known->second;
  };
  const std::optional<EntryId> chosen = order_.evict(partition.id, may_evict);
  if (!chosen) return false;
  Entry& victim = *entries_[*chosen];
  const bool is_alone = pool_.shape(victim.block->slot()) == need.shape;
  const std::uint32_t slab = victim.block->slot().slab;
  evict_entry(victim, need.account);
  if (!is_alone) evict_slab(slab, need);
  return true;
}

bool PrefixIndex::can_evict_slab(std::uint32_t slab, const Need& need) {
  const SlabEntries& held = by_slab_.at(slab);
  if (held.count != pool_.used_in_slab(slab)) return false;
  std::unordered_map<const Partition*, std::uint64_t> goes;
  for (const Entry* entry = held.first; entry != nullptr; entry = entry->slab_next) {
    if (!is_evictable(*entry)) return false;
    goes[&account_of(*entry).partition()] += pool_.shape(entry->block->slot()).block_bytes();
  }
  return std::all_of(goes.begin(), goes.end(), [&](const auto& of_one) {
    return of_one.second <= allowance(*of_one.first, need);
  });
}

void PrefixIndex::evict_slab(std::uint32_t slab, const Need& need) {
  const auto at = by_slab_.find(slab);
  if (at == by_slab_.end()) return;
  std::vector<Entry*> victims;
  for (Entry* entry = at->second.first; entry != nullptr; entry = entry->slab_next) {
    victims.push_back(entry);
  }
  for (Entry* victim : victims) victim->leaves = true;
  for (Entry* victim : victims) evict_entry(*victim, need.account);
}

void PrefixIndex::evict_entry(Entry& entry, const NamespaceAccount* account) {
  NamespaceAccount& own = account_of(entry);
  ++stats_.evicted;
  ++own.counters.evicted;
  if (account != nullptr && account != &own) ++own.counters.evicted_for_others;
  erase(entry);
}

}  // namespace kvferry::cache_manager
