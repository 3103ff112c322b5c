// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/prefix_index.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>
#include <iterator>

namespace kvferry::cache_manager {
namespace {

// How many of the n blocks of a prefix, counted from its end, a group must hold.
std::uint32_t needed_tail(const ipc::GroupSpec& group, std::uint32_t n) {
  switch (group.rule) {
    case ipc::HitRule::kFull: return n;
    case ipc::HitRule::kSlidingWindow: return std::min(n, std::max(group.window_blocks, 1U));
    case ipc::HitRule::kLastState: return 1;
  }
  return n;
}

}  // namespace

// Tokens start at random, so that one of an earlier manager life is not taken for one of this.
PrefixIndex::PrefixIndex(HostPool& pool)
    : pool_(pool), next_token_((ipc::Digest::random().low() >> 1U) | 1U) {}

PrefixIndex::~PrefixIndex() = default;

PrefixIndex::Entry* PrefixIndex::find(const ipc::BlockKey& key) const {
  const auto root = roots_.find(key.root);
  if (root == roots_.end()) {
    return nullptr;
  }
  const auto at = root->second.find(key);
  return at == root->second.end() ? nullptr : at->second.get();
}

void PrefixIndex::make_recent(Entry& entry) {
  if (entry.in_lru) {
    lru_.splice(lru_.end(), lru_, entry.lru);
    return;
  }
  if (entry.state == State::kVisible && entry.pins.empty()) {
    lru_.push_back(&entry);
    entry.lru = std::prev(lru_.end());
    entry.in_lru = true;
  }
}

void PrefixIndex::leave_lru(Entry& entry) {
  if (entry.in_lru) {
    lru_.erase(entry.lru);
    entry.in_lru = false;
  }
}

ipc::LookupReply PrefixIndex::lookup(const ipc::Digest& root,
                                     std::span<const ipc::Digest> blocks,
                                     std::span<const ipc::GroupSpec> groups) {
  ipc::LookupReply reply;
  const auto count = static_cast<std::uint32_t>(blocks.size());
  reply.presence.assign(groups.size() * blocks.size(),
                        static_cast<std::uint8_t>(ipc::BlockPresence::kMiss));
  // allowed[n - 1]: every group holds what a prefix of n needs.
  std::vector<bool> allowed(count, true);
  for (std::uint32_t group = 0; group < groups.size(); ++group) {
    std::uint32_t run = 0;  // Visible blocks in a row that end here.
    for (std::uint32_t i = 0; i < count; ++i) {
      const Entry* entry = find({root, blocks[i], ipc::GroupId{group}});
      auto presence = ipc::BlockPresence::kMiss;
      if (entry != nullptr) {
        presence = entry->state == State::kVisible ? ipc::BlockPresence::kHit
                                                   : ipc::BlockPresence::kHitPending;
      }
      reply.presence[std::size_t{group} * count + i] = static_cast<std::uint8_t>(presence);
      run = presence == ipc::BlockPresence::kHit ? run + 1 : 0;
      if (run < needed_tail(groups[group], i + 1)) {
        allowed[i] = false;
      }
    }
  }
  for (std::uint32_t n = groups.empty() ? 0 : count; n > 0; --n) {
    if (allowed[n - 1]) {
      reply.usable_prefix = n;
      break;
    }
  }
  touch(root, blocks.first(reply.usable_prefix), static_cast<std::uint32_t>(groups.size()));
  return reply;
}

// Last to first: of one prefix, the last block is the first to be evicted.
void PrefixIndex::touch(const ipc::Digest& root,
                        std::span<const ipc::Digest> blocks,
                        std::uint32_t groups) {
  for (std::size_t i = blocks.size(); i-- > 0;) {
    for (std::uint32_t group = 0; group < groups; ++group) {
      if (Entry* entry = find({root, blocks[i], ipc::GroupId{group}})) {
        make_recent(*entry);
      }
    }
  }
}

std::uint32_t PrefixIndex::pin(const ipc::IncarnationId& client,
                               const ipc::Digest& root,
                               std::span<const ipc::Digest> blocks,
                               std::uint32_t groups) {
  std::uint32_t pinned = 0;
  for (const ipc::Digest& block : blocks) {
    bool any = false;
    for (std::uint32_t group = 0; group < groups; ++group) {
      Entry* entry = find({root, block, ipc::GroupId{group}});
      if (entry == nullptr || entry->state != State::kVisible) {
        continue;
      }
      stats_.pinned += entry->pins.empty() ? 1U : 0U;
      ++entry->pins[client];
      pinned_by_[client].insert(entry);
      leave_lru(*entry);
      any = true;
    }
    pinned += any ? 1U : 0U;
  }
  return pinned;
}

std::uint32_t PrefixIndex::unpin(const ipc::IncarnationId& client,
                                 const ipc::Digest& root,
                                 std::span<const ipc::Digest> blocks,
                                 std::uint32_t groups) {
  std::uint32_t unpinned = 0;
  for (std::size_t i = blocks.size(); i-- > 0;) {
    bool any = false;
    for (std::uint32_t group = 0; group < groups; ++group) {
      Entry* entry = find({root, blocks[i], ipc::GroupId{group}});
      if (entry == nullptr || !entry->pins.contains(client)) {
        continue;
      }
      unpin_entry(*entry, client, /*all=*/false);
      any = true;
    }
    unpinned += any ? 1U : 0U;
  }
  return unpinned;
}

void PrefixIndex::unpin_entry(Entry& entry, const ipc::IncarnationId& client, bool all) {
  const auto pin = entry.pins.find(client);
  if (!all && --pin->second > 0) {
    return;
  }
  entry.pins.erase(pin);
  if (const auto held = pinned_by_.find(client); held != pinned_by_.end()) {
    held->second.erase(&entry);
    if (held->second.empty()) {
      pinned_by_.erase(held);
    }
  }
  if (entry.pins.empty()) {
    --stats_.pinned;
    make_recent(entry);
  }
}

ipc::ReservedSlot PrefixIndex::reserve(const ipc::IncarnationId& client,
                                       const ipc::BlockKey& key,
                                       const SlabShape& shape,
                                       Extent& extent) {
  if (find(key) != nullptr) {
    return {.outcome = ipc::ReserveOutcome::kAlreadyThere, .slot = 0};
  }
  HostBlockRef block = allocate(shape, extent);
  if (block == nullptr) {
    return {.outcome = ipc::ReserveOutcome::kFull, .slot = 0};
  }
  auto entry = std::make_unique<Entry>();
  entry->key = key;
  entry->token = next_token_++;
  entry->owner = client;
  by_slab_[block->slot().slab].insert(entry.get());
  entry->block = std::move(block);
  tokens_.emplace(entry->token, entry.get());
  ++stats_.reserved;
  const Token token = entry->token;
  roots_[key.root].emplace(key, std::move(entry));
  return {.outcome = ipc::ReserveOutcome::kReserved, .slot = token};
}

const ipc::BlockKey* PrefixIndex::reservation(const ipc::IncarnationId& client, Token token) const {
  const auto at = tokens_.find(token);
  if (at == tokens_.end() || at->second->owner != client || at->second->state != State::kReserved) {
    return nullptr;
  }
  return &at->second->key;
}

HostBlockRef PrefixIndex::begin_fill(const ipc::IncarnationId& client, Token token) {
  KVFERRY_CHECK(reservation(client, token) != nullptr, "fill without a reservation");
  Entry& entry = *tokens_.at(token);
  entry.state = State::kFilling;
  return entry.block;
}

bool PrefixIndex::commit(Token token) {
  const auto at = tokens_.find(token);
  if (at == tokens_.end()) {
    return false;
  }
  Entry& entry = *at->second;
  KVFERRY_CHECK(entry.state == State::kFilling, "commit of a block that was not filled");
  tokens_.erase(at);
  entry.state = State::kVisible;
  --stats_.reserved;
  ++stats_.visible;
  make_recent(entry);
  return true;
}

void PrefixIndex::discard(Token token) {
  if (const auto at = tokens_.find(token); at != tokens_.end()) {
    erase(*at->second);
  }
}

HostBlockRef PrefixIndex::acquire(const ipc::BlockKey& key) {
  Entry* entry = find(key);
  if (entry == nullptr || entry->state != State::kVisible) {
    return nullptr;
  }
  make_recent(*entry);
  return entry->block;
}

HostBlockRef PrefixIndex::allocate(const SlabShape& shape, Extent& extent) {
  std::optional<HostSlot> slot = pool_.allocate(shape, extent);
  if (!slot && pool_.can_hold(shape)) {
    // For the whole batch at once: what was stored together is evicted together, and lies together.
    // Pages that another shape has given back hold more than that.
    std::uint32_t evicted = 0;
    while (evicted < extent.left && !pool_.can_open(shape) && evict_for(shape)) ++evicted;
    if (evicted > 0) slot = pool_.allocate(shape, extent);
    while (!slot && evict_for(shape)) slot = pool_.allocate(shape, extent);
  }
  if (!slot) return nullptr;
  extent.advance(*slot);
  return std::make_shared<const HostBlock>(pool_, *slot);
}

// The least recently used block if it has the wanted shape; else the whole slab that it lies in,
// because only whole slabs change their shape.
bool PrefixIndex::evict_for(const SlabShape& shape) {
  std::unordered_set<std::uint32_t> stuck;
  for (Entry* oldest : lru_) {
    Entry& entry = *oldest;
    if (!is_evictable(entry)) {
      continue;
    }
    if (pool_.shape(entry.block->slot()) == shape) {
      ++stats_.evicted;
      erase(entry);
      return true;
    }
    const std::uint32_t slab = entry.block->slot().slab;
    if (!stuck.contains(slab)) {
      if (evict_slab(slab)) {
        return true;
      }
      stuck.insert(slab);
    }
  }
  return false;
}

bool PrefixIndex::evict_slab(std::uint32_t slab) {
  const auto& held = by_slab_.at(slab);
  if (held.size() != pool_.used_in_slab(slab) ||
      !std::all_of(held.begin(), held.end(), [](const Entry* e) { return is_evictable(*e); })) {
    return false;
  }
  const std::vector<Entry*> victims(held.begin(), held.end());
  for (Entry* victim : victims) {
    ++stats_.evicted;
    erase(*victim);
  }
  return true;
}

void PrefixIndex::erase(Entry& entry) {
  leave_lru(entry);
  if (entry.state == State::kVisible) {
    --stats_.visible;
  } else {
    --stats_.reserved;
    tokens_.erase(entry.token);
  }
  if (!entry.pins.empty()) {
    --stats_.pinned;
    for (const auto& [client, count] : entry.pins) {
      if (const auto held = pinned_by_.find(client); held != pinned_by_.end()) {
        held->second.erase(&entry);
        if (held->second.empty()) {
          pinned_by_.erase(held);
        }
      }
    }
  }
  if (const auto held = by_slab_.find(entry.block->slot().slab); held != by_slab_.end()) {
    held->second.erase(&entry);
    if (held->second.empty()) {
      by_slab_.erase(held);
    }
  }
  const ipc::BlockKey key = entry.key;
  const auto root = roots_.find(key.root);
  root->second.erase(key);
  if (root->second.empty()) {
    roots_.erase(root);
  }
}

void PrefixIndex::drop_client(const ipc::IncarnationId& client) {
  if (const auto held = pinned_by_.find(client); held != pinned_by_.end()) {
    const std::vector<Entry*> pinned(held->second.begin(), held->second.end());
    for (Entry* entry : pinned) {
      unpin_entry(*entry, client, /*all=*/true);
    }
  }
  std::vector<Entry*> reserved;
  for (const auto& [token, entry] : tokens_) {
    if (entry->owner == client && entry->state == State::kReserved) {
      reserved.push_back(entry);
    }
  }
  for (Entry* entry : reserved) {
    erase(*entry);
  }
}

std::uint64_t PrefixIndex::drop_root(const ipc::Digest& root, const IsForeign& is_foreign) {
  const auto at = roots_.find(root);
  if (at == roots_.end()) {
    return 0;
  }
  std::vector<Entry*> victims;
  std::uint64_t visible = 0;
  for (const auto& [key, entry] : at->second) {
    const bool kept = entry->state == State::kVisible
                          ? std::any_of(entry->pins.begin(), entry->pins.end(),
                                        [&](const auto& pin) { return is_foreign(pin.first); })
                          : is_foreign(entry->owner);
    if (!kept) {
      victims.push_back(entry.get());
      visible += entry->state == State::kVisible ? 1U : 0U;
    }
  }
  for (Entry* victim : victims) {
    erase(*victim);
  }
  return visible;
}

}  // namespace kvferry::cache_manager
