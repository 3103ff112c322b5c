// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/prefix_index.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>
#include <functional>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// A pool of blocks that are smaller than this has some that engines do not find.
constexpr std::uint64_t kLeastBlockBytes = 64;

}  // namespace

// Tokens start at random, so that one of an earlier manager life is not taken for one of this.
PrefixIndex::PrefixIndex(HostPool& pool, std::string_view policy, NamespaceQuotas quotas)
    : pool_(pool),
      accounts_(pool.stats().bytes, std::move(quotas)),
      order_(policy),
      table_(pool.stats().bytes / kLeastBlockBytes),
      runs_(table_,
            [this](RunNode& below, RunNode& above) { order_.continue_from(below.id, above.id); }),
      next_token_((ipc::Digest::random().low() >> 1U) | 1U) {
  accounts_.on_partition_gone([this](std::uint32_t partition) { order_.forget(partition); });
}

PrefixIndex::~PrefixIndex() = default;

const PrefixIndex::Named* PrefixIndex::find_in(const Table& table, const ipc::BlockKey& key) const {
  const std::uint64_t hash = hash_of(key);
  return table.find(hash, [&](const Named& named) {
    return named.tag == hash >> 32U &&
           SplitMapKey<ipc::BlockKey>::Equal{}(store_[named.place].key, key);
  });
}

PrefixIndex::Place PrefixIndex::place_of(const ipc::BlockKey& key) const {
  const auto root = roots_.find(key.root);
  if (root == roots_.end()) return kNoPlace;
  const Named* named = find_in(root->second, key);
  return named == nullptr ? kNoPlace : named->place;
}

PrefixIndex::Entry* PrefixIndex::find_before(const Entry& entry) {
  if (is_none(entry.before)) return nullptr;
  const ipc::BlockKey key{entry.key.root, entry.before, entry.key.group};
  if (entry.before_at != kNoPlace) {
    Entry& there = store_[entry.before_at];
    if (SplitMapKey<ipc::BlockKey>::Equal{}(there.key, key)) return &there;
  }
  return find(key);
}

PrefixIndex::Entry& PrefixIndex::make_entry() {
  if (unused_.empty()) {
    unused_.push_back(static_cast<Place>(store_.size()));
    store_.grow(store_.size() + 1);
  }
  const Place place = unused_.back();
  unused_.pop_back();
  store_[place].place = place;
  return store_[place];
}

void PrefixIndex::name(const Entry& entry, Table& table) {
  const std::uint64_t hash = hash_of(entry.key);
  table.add(hash) = {static_cast<std::uint32_t>(hash >> 32U), entry.place};
}

void PrefixIndex::unmake(Entry& entry) {
  unused_.push_back(entry.place);
  entry = {};
}

NamespaceAccount& PrefixIndex::account_of(const Entry& entry) const {
  NamespaceAccount* account = entry.block->account();
  return account != nullptr ? *account : accounts_.nobody();
}

void PrefixIndex::begin_cached(const Entry& entry) {
  account_of(entry).begin_cached(pool_.shape(entry.block->slot()).block_bytes());
}

void PrefixIndex::end_cached(const Entry& entry) {
  account_of(entry).end_cached(pool_.shape(entry.block->slot()).block_bytes());
}

BlockUse PrefixIndex::use_of(const Entry& entry) {
  return {entry.id, std::hash<ipc::BlockKey>{}(entry.key)};
}

void PrefixIndex::give_id(Entry& entry) {
  if (free_ids_.empty()) {
    entry.id = static_cast<EntryId>(entries_.size());
    entries_.add(&entry);
  } else {
    entry.id = free_ids_.back();
    free_ids_.pop_back();
    entries_[entry.id] = &entry;
  }
  begin_cached(entry);
  // Blocks of several shapes share the pool; by the first one it is known how many that holds.
  const Partition& partition = account_of(entry).partition();
  const std::uint64_t bytes = pool_.shape(entry.block->slot()).block_bytes();
  order_.enter(entry.id, partition.id, std::max<std::uint64_t>(1, partition.expected / bytes));
}

// Each run of blocks that continue each other is a request.
void PrefixIndex::use_new(std::span<Entry* const> entries) {
  for (std::size_t first = 0; first < entries.size();) {
    std::size_t end = first;
    path_.clear();
    do {
      path_.push_back(use_of(*entries[end]));
      ++end;
    } while (end < entries.size() && continues(*entries[end], *entries[end - 1]));
    const Entry* above = find_before(*entries[first]);
    order_.use(path_, above == nullptr ? kNoEntry : above->id);
    first = end;
  }
}

void PrefixIndex::add_awaiting(Entry& entry) {
  if (++entry.awaited_by == 1 && entry.id != kNoEntry) order_.hold(entry.id);
}

void PrefixIndex::take_awaiting(Entry& entry) {
  KVFERRY_CHECK(entry.awaited_by > 0, "a block is not awaited that nobody awaits");
  if (--entry.awaited_by == 0 && entry.id != kNoEntry) order_.let_go(entry.id);
}

bool PrefixIndex::await(const ipc::BlockKey& key) {
  Entry* entry = find(key);
  if (entry != nullptr) add_awaiting(*entry);
  return entry != nullptr;
}

void PrefixIndex::stop_awaiting(const ipc::BlockKey& key) {
  Entry* entry = find(key);
  KVFERRY_CHECK(entry != nullptr, "a block is gone that was awaited");
  take_awaiting(*entry);
}

void PrefixIndex::hold_before(const Entry& entry, Reservation& reservation) {
  Entry* above = find_before(entry);
  if (above == nullptr) return;
  reservation.before = above->token;
  add_awaiting(*above);
}

void PrefixIndex::let_go_before(const Reservation& reservation) {
  if (reservation.before == 0) return;
  const Entry& entry = *reservation.entry;
  Entry* above = find({entry.key.root, entry.before, entry.key.group});
  if (above != nullptr && above->token == reservation.before) take_awaiting(*above);
}

ipc::LookupReply PrefixIndex::lookup(const ipc::Digest& root,
                                     std::span<const ipc::Digest> blocks,
                                     std::span<const ipc::GroupRule> rules) const {
  ipc::LookupReply reply;
  const auto count = static_cast<std::uint32_t>(blocks.size());
  reply.presence.assign(rules.size() * blocks.size(),
                        static_cast<std::uint8_t>(ipc::BlockPresence::kMiss));
  // allowed[n - 1]: every group holds what a prefix of n needs.
  std::vector<bool> allowed(count, true);
  for (std::uint32_t group = 0; group < rules.size(); ++group) {
    std::uint32_t run = 0;  // Visible blocks in a row that end here.
    for (std::uint32_t i = 0; i < count; ++i) {
      const Entry* entry = find({root, blocks[i], ipc::GroupId{group}});
      auto presence = ipc::BlockPresence::kMiss;
      if (entry != nullptr) {
        presence = entry->state == State::kVisible ? ipc::BlockPresence::kHit
                                                   : ipc::BlockPresence::kHitPending;
      } else if (is_unknown(root)) {
        presence = ipc::BlockPresence::kHitPending;
      }
      reply.presence[std::size_t{group} * count + i] = static_cast<std::uint8_t>(presence);
      run = presence == ipc::BlockPresence::kHit ? run + 1 : 0;
      if (run < ipc::blocks_needed(rules[group], i + 1)) {
        allowed[i] = false;
      }
    }
  }
  for (std::uint32_t n = rules.empty() ? 0 : count; n > 0; --n) {
    if (allowed[n - 1]) {
      reply.usable_prefix = n;
      break;
    }
  }
  return reply;
}

void PrefixIndex::use(const ipc::Digest& root,
                      std::span<const ipc::Digest> blocks,
                      std::uint32_t groups) {
  runs_.begin();
  path_.clear();
  ++uses_;
  const auto use_piece = [this] {
    order_.use(path_);
    path_.clear();
  };
  for (std::uint32_t group = 0; group < groups; ++group) {
    Entry* above = nullptr;
    for (const ipc::Digest& block : blocks) {
      Entry* entry = find({root, block, ipc::GroupId{group}});
      if (entry == nullptr || entry->run == 0) {
        use_piece();  // what is behind a gap does not continue what is before it
        above = nullptr;
        continue;
      }
      path_.push_back(use_of(*entry));
      tell_used(*entry);
      if (above != nullptr) runs_.link(*entry, *above);
      above = entry;
    }
    use_piece();
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
      any = pin(client, {root, block, ipc::GroupId{group}}) || any;
    }
    pinned += any ? 1U : 0U;
  }
  return pinned;
}

bool PrefixIndex::pin(const ipc::IncarnationId& client, const ipc::BlockKey& key) {
  Entry* entry = find(key);
  if (entry == nullptr || entry->state != State::kVisible) {
    return false;
  }
  if (entry->pins == nullptr) {
    entry->pins = std::make_unique<Pins>();
    ++stats_.pinned;
    end_cached(*entry);
    order_.hold(entry->id);
  }
  ++(*entry->pins)[client];
  pinned_by_[client].insert(entry);
  return true;
}

std::uint32_t PrefixIndex::unpin(const ipc::IncarnationId& client,
                                 const ipc::Digest& root,
                                 std::span<const ipc::Digest> blocks,
                                 std::uint32_t groups) {
  std::uint32_t unpinned = 0;
  for (std::size_t i = blocks.size(); i-- > 0;) {
    bool any = false;
    for (std::uint32_t group = 0; group < groups; ++group) {
      any = unpin(client, {root, blocks[i], ipc::GroupId{group}}) || any;
    }
    unpinned += any ? 1U : 0U;
  }
  return unpinned;
}

bool PrefixIndex::unpin(const ipc::IncarnationId& client, const ipc::BlockKey& key) {
  Entry* entry = find(key);
  if (entry == nullptr || entry->pins == nullptr || !entry->pins->contains(client)) {
    return false;
  }
  unpin_entry(*entry, client, /*all=*/false);
  return true;
}

void PrefixIndex::unpin_entry(Entry& entry, const ipc::IncarnationId& client, bool all) {
  const auto pin = entry.pins->find(client);
  if (!all && --pin->second > 0) {
    return;
  }
  entry.pins->erase(pin);
  if (const auto held = pinned_by_.find(client); held != pinned_by_.end()) {
    held->second.erase(&entry);
    if (held->second.empty()) {
      pinned_by_.erase(held);
    }
  }
  if (entry.pins->empty()) {
    entry.pins.reset();
    --stats_.pinned;
    begin_cached(entry);
    order_.let_go(entry.id);
  }
}

ipc::ReservedSlot PrefixIndex::reserve(const ipc::IncarnationId& client,
                                       const ipc::BlockKey& key,
                                       const ipc::Digest& before,
                                       const SlabShape& shape,
                                       Extent& extent,
                                       const StoreTerms& terms) {
  if (Entry* there = find(key)) {
    if (terms.retention) retain(*there, *terms.retention);
    if (there->state != State::kVisible) {
      return {.outcome = ipc::ReserveOutcome::kInUse, .slot = 0};
    }
    // It may have been stored by somebody who did not say what it continues.
    Entry* above = before.is_zero() ? nullptr : find({key.root, before, key.group});
    if (there->run > 0 && above != nullptr && above->run > 0) runs_.link(*there, *above);
    return {.outcome = ipc::ReserveOutcome::kAlreadyThere, .slot = 0};
  }
  if (is_unknown(key.root)) return {.outcome = ipc::ReserveOutcome::kInUse, .slot = 0};
  Entry& entry = make_entry();
  entry.key = key;
  entry.before = before;
  Reservation reservation{&entry, client};
  hold_before(entry, reservation);
  HostBlockRef block = allocate(shape, extent, terms.account);
  if (block == nullptr) {
    let_go_before(reservation);
    unmake(entry);
    return {.outcome = ipc::ReserveOutcome::kFull, .slot = 0};
  }
  entry.token = next_token_++;
  if (terms.retention) entry.kept = Kept::from(*terms.retention, now_());
  entry.block = std::move(block);
  enter_slab(entry);
  tokens_.emplace(entry.token, reservation);
  table_.put(key, {.pending = true, .run = 0});
  ++stats_.reserved;
  name(entry, roots_[key.root]);
  return {.outcome = ipc::ReserveOutcome::kReserved, .slot = entry.token};
}

void PrefixIndex::retain(Entry& entry, const ipc::Retention& retention) {
  const ipc::TimePoint now = now_();
  entry.kept = Kept::stronger(entry.kept, Kept::from(retention, now), now);
  if (entry.id != kNoEntry) order_.retain(entry.id, entry.kept);
}

const ipc::BlockKey* PrefixIndex::reservation(const ipc::IncarnationId& client, Token token) const {
  const auto at = tokens_.find(token);
  if (at == tokens_.end() || at->second.owner != client ||
      at->second.entry->state != State::kReserved) {
    return nullptr;
  }
  return &at->second.entry->key;
}

std::uint64_t PrefixIndex::lacking(const ipc::BlockKey& key, std::uint64_t parts) const {
  const Entry* there = find(key);
  return there == nullptr || there->state != State::kVisible ? 0 : parts & ~there->block->parts();
}

bool PrefixIndex::drop_lacking(const ipc::BlockKey& key, std::uint64_t parts) {
  if (lacking(key, parts) == 0) return true;
  Entry* there = find(key);
  if (there->pins != nullptr || there->awaited_by > 0) return false;
  erase(*there);
  return true;
}

HostBlockRef PrefixIndex::begin_fill(const ipc::IncarnationId& client,
                                     Token token,
                                     std::uint64_t parts) {
  KVFERRY_CHECK(reservation(client, token) != nullptr, "fill without a reservation");
  Entry& entry = *tokens_.at(token).entry;
  entry.state = State::kFilling;
  entry.block->set_parts(parts);
  return entry.block;
}

std::vector<bool> PrefixIndex::commit(std::span<const Token> tokens) {
  std::vector<bool> was_there;
  std::vector<Entry*> entries;
  std::vector<Reservation> reservations;
  ++uses_;
  for (const Token token : tokens) {
    const auto at = tokens_.find(token);
    was_there.push_back(at != tokens_.end());
    if (at == tokens_.end()) continue;
    Entry& entry = *at->second.entry;
    KVFERRY_CHECK(entry.state == State::kFilling, "commit of a block that was not filled");
    reservations.push_back(at->second);
    tokens_.erase(at);
    entry.state = State::kVisible;
    --stats_.reserved;
    ++stats_.visible;
    give_id(entry);
    ++account_of(entry).counters.stored;
    tell_visible(entry);
    entries.push_back(&entry);
  }
  use_new(entries);
  for (const Entry* entry : entries) order_.retain(entry->id, entry->kept);
  runs_.begin();
  runs_.hold_back();
  for (Entry* entry : entries) make_findable(*entry);
  runs_.tell();
  for (Entry* entry : entries) {
    if (entry->awaited_by > 0) order_.hold(entry->id);
  }
  for (const Reservation& reservation : reservations) let_go_before(reservation);
  for (PrefixObserver* observer : observers_) {
    for (const Entry* entry : entries) observer->stored(entry->key, entry->before);
  }
  return was_there;
}

void PrefixIndex::tell_visible(const Entry& entry) const {
  if (PoolObserver* observer = pool_.observer()) {
    observer->on_visible(entry.block->slot(), entry.key, entry.before, {});
    observer->on_used(entry.block->slot(), uses_);
  }
}

void PrefixIndex::tell_used(const Entry& entry) const {
  if (PoolObserver* observer = pool_.observer()) {
    observer->on_used(entry.block->slot(), uses_);
  }
}

std::size_t PrefixIndex::visit_visible(std::size_t from,
                                       std::size_t most,
                                       const OnVisible& on_visible) const {
  const std::size_t end = from + std::min(most, entries_.size() - std::min(from, entries_.size()));
  for (std::size_t id = from; id < end; ++id) {
    if (const Entry* entry = entries_[id]) on_visible(entry->key, entry->before);
  }
  return end < entries_.size() ? end : 0;
}

// What it continues first, where that became visible with it: else a job's blocks that come last to
// first would each renew the runs of all behind them.
void PrefixIndex::make_findable(Entry& entry) {
  const auto above_of = [this](const Entry& node) -> Entry* {
    Entry* above = find_before(node);
    return above != nullptr && above->state == State::kVisible ? above : nullptr;
  };
  std::vector<Entry*> chain;
  for (Entry* next = &entry; next != nullptr && next->run == 0 && !next->is_next;
       next = above_of(*next)) {
    next->is_next = true;
    chain.push_back(next);
  }
  while (!chain.empty()) {
    Entry& next = *chain.back();
    chain.pop_back();
    Entry* above = above_of(next);
    runs_.add(next, above != nullptr && above->run > 0 ? above : nullptr);
    next.is_next = false;
  }
}

void PrefixIndex::discard(Token token) {
  if (const auto at = tokens_.find(token); at != tokens_.end()) {
    erase(*at->second.entry);
  }
}

HostBlockRef PrefixIndex::acquire(const ipc::BlockKey& key) {
  Entry* entry = find(key);
  if (entry == nullptr || entry->state != State::kVisible) {
    return nullptr;
  }
  return entry->block;
}

void PrefixIndex::drop_block(const HostBlock& block) {
  const auto slab = by_slab_.find(block.slot().slab);
  Entry* at = slab == by_slab_.end() ? nullptr : slab->second.first;
  while (at != nullptr && at->block.get() != &block) at = at->slab_next;
  if (at != nullptr) erase(*at);
}

void PrefixIndex::enter_slab(Entry& entry) {
  SlabEntries& slab = by_slab_[entry.block->slot().slab];
  entry.slab_next = slab.first;
  if (slab.first != nullptr) slab.first->slab_previous = &entry;
  slab.first = &entry;
  ++slab.count;
}

void PrefixIndex::leave_slab(Entry& entry) {
  const auto slab = by_slab_.find(entry.block->slot().slab);
  KVFERRY_CHECK(slab != by_slab_.end(), "a block leaves a slab that has none");
  (entry.slab_previous == nullptr ? slab->second.first : entry.slab_previous->slab_next) =
      entry.slab_next;
  if (entry.slab_next != nullptr) entry.slab_next->slab_previous = entry.slab_previous;
  if (--slab->second.count == 0) by_slab_.erase(slab);
}

void PrefixIndex::erase(Entry& entry) {
  if (is_reserved(entry)) let_go_before(tokens_.at(entry.token));
  if (entry.id != kNoEntry) {
    if (entry.pins == nullptr) end_cached(entry);
    order_.leave(entry.id);
    entries_[entry.id] = nullptr;
    free_ids_.push_back(entry.id);
  }
  if (entry.state == State::kVisible) {
    if (PoolObserver* observer = pool_.observer()) observer->on_hidden(entry.block->slot());
    runs_.remove(entry);
    --stats_.visible;
    for (PrefixObserver* observer : observers_) observer->removed(entry.key);
  } else if (entry.state == State::kAnnounced) {
    --announced_;
  } else {
    table_.erase(entry.key);
    --stats_.reserved;
    tokens_.erase(entry.token);
  }
  if (entry.pins != nullptr) {
    --stats_.pinned;
    for (const auto& [client, count] : *entry.pins) {
      if (const auto held = pinned_by_.find(client); held != pinned_by_.end()) {
        held->second.erase(&entry);
        if (held->second.empty()) {
          pinned_by_.erase(held);
        }
      }
    }
  }
  leave_slab(entry);
  const auto root = roots_.find(entry.key.root);
  root->second.erase(*find_in(root->second, entry.key));
  if (root->second.empty()) {
    roots_.erase(root);
  }
  unmake(entry);
}

void PrefixIndex::drop_client(const ipc::IncarnationId& client) {
  if (const auto held = pinned_by_.find(client); held != pinned_by_.end()) {
    const std::vector<Entry*> pinned(held->second.begin(), held->second.end());
    for (Entry* entry : pinned) {
      unpin_entry(*entry, client, /*all=*/true);
    }
  }
  std::vector<Entry*> reserved;
  for (const auto& [token, reservation] : tokens_) {
    if (reservation.owner == client && reservation.entry->state == State::kReserved) {
      reserved.push_back(reservation.entry);
    }
  }
  for (Entry* entry : reserved) {
    erase(*entry);
  }
}

std::uint64_t PrefixIndex::drop_root(const ipc::Digest& root, const IsForeign& is_foreign) {
  awaited_roots_.erase(root);
  const auto at = roots_.find(root);
  if (at == roots_.end()) {
    return 0;
  }
  std::vector<Entry*> victims;
  std::uint64_t visible = 0;
  const auto is_kept = [&](const Entry& entry) {
    if (is_reserved(entry)) return is_foreign(tokens_.at(entry.token).owner);
    return entry.pins != nullptr &&
           std::any_of(entry.pins->begin(), entry.pins->end(),
                       [&](const auto& pin) { return is_foreign(pin.first); });
  };
  at->second.visit([&](const Named& named) {
    Entry& entry = store_[named.place];
    if (is_kept(entry)) return;
    entry.leaves = true;
    victims.push_back(&entry);
    visible += entry.state == State::kVisible ? 1U : 0U;
  });
  for (Entry* victim : victims) {
    erase(*victim);
  }
  // One whose blocks were still to be announced.
  if (const auto left = roots_.find(root); left != roots_.end() && left->second.empty()) {
    roots_.erase(left);
  }
  if (!has_root(root)) {
    for (PrefixObserver* observer : observers_) observer->emptied(root);
  }
  return visible;
}

}  // namespace kvferry::cache_manager
