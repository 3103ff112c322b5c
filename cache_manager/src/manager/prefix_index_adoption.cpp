// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Blocks of an earlier manager: announced one by one, as they lie in the pool, and then made
// visible in the order in which they were used, each behind what it continues. So the run of each
// is told once, however the blocks of a prefix came into the pool.
#include "manager/prefix_index.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// Blocks before one that become visible with it, at most: a turn of the loop. What lies before
/// those comes later, and is joined then.
constexpr std::size_t kMostChain = std::size_t{1} << 14;

/// Of one root: its map is made as large as they need at once.
constexpr std::size_t kManyBlocks = 4096;

/// Blocks whose memory is fetched at a time: about as many lines as a core can.
constexpr std::size_t kAtOnce = 16;
/// Blocks that scout() looks at, at most: what fits into the cache of a core.
constexpr std::size_t kMostScouted = 4096;
constexpr std::size_t kLine = 64;

}  // namespace

void PrefixIndex::begin_announcing(std::span<const Expected> roots) {
  is_announcing_ = true;
  std::size_t blocks = 0;
  for (const Expected& expected : roots) {
    blocks += expected.blocks;
    if (expected.blocks >= kManyBlocks) roots_[expected.root].reserve(expected.blocks);
  }
  table_.reserve(blocks);
}

void PrefixIndex::forget_awaited_roots() {
  awaited_roots_.clear();
  // Of those whose blocks were all dropped.
  std::erase_if(roots_, [](const auto& root) { return root.second.empty(); });
}

std::optional<PrefixIndex::Announced> PrefixIndex::announce(Found found) {
  if (!awaited_roots_.contains(found.key.root)) return std::nullopt;
  Table& table = roots_[found.key.root];
  if (find_in(table, found.key) != nullptr) return std::nullopt;
  Entry& entry = make_entry();
  entry.key = found.key;
  entry.before = found.before;
  entry.state = State::kAnnounced;
  entry.token = next_token_++;
  entry.block = std::move(found.block);
  name(entry, table);
  enter_slab(entry);
  ++announced_;
  return entry.place;
}

void PrefixIndex::expect(const ipc::BlockKey& key) const {
  const auto root = roots_.find(key.root);
  if (root != roots_.end()) root->second.prefetch(hash_of(key));
}

// Each by itself: as links of a chain, one after another, they would have to be waited for.
void PrefixIndex::connect(std::span<const Announced> blocks) {
  std::array<Entry*, kAtOnce> looks{};
  const Entry* last = nullptr;
  while (!blocks.empty()) {
    std::size_t count = 0;
    for (; !blocks.empty() && count < kAtOnce; blocks = blocks.subspan(1)) {
      Entry& entry = store_[blocks.front()];
      if (entry.state != State::kAnnounced) continue;
      if (last != nullptr && continues(entry, *last)) {
        entry.before_at = last->place;
      } else if (!is_none(entry.before)) {
        expect({entry.key.root, entry.before, entry.key.group});
        looks[count++] = &entry;
      }
      last = &entry;
    }
    for (std::size_t i = 0; i < count; ++i) {
      Entry& entry = *looks[i];
      const auto root = roots_.find(entry.key.root);
      const std::uint64_t hash = hash_of({entry.key.root, entry.before, entry.key.group});
      // By its tag, which another one may have, too: who uses it sees by its key.
      const Named* named = root->second.find(hash, [&](const Named& one) {
        return one.tag == static_cast<std::uint32_t>(hash >> 32U);
      });
      if (named != nullptr) entry.before_at = named->place;
    }
  }
}

std::size_t PrefixIndex::adopt(std::span<const Found> blocks) {
  std::vector<Announced> announced;
  for (const Found& found : blocks) {
    if (const auto one = announce(found)) announced.push_back(*one);
  }
  return adopt(announced, announced.size()).visible;
}

PrefixIndex::Adopted PrefixIndex::adopt(std::span<const Announced> blocks, std::size_t most) {
  adopted_.clear();
  std::size_t looked_at = 0;
  for (; looked_at < blocks.size() && adopted_.size() < most; ++looked_at) {
    if (looked_at % kAtOnce == 0) scout(blocks.subspan(looked_at));
    Entry& entry = store_[blocks[looked_at]];
    if (!entry.is_next) add_chain(entry);
  }
  make_adopted_visible();
  return {looked_at, adopted_.size()};
}

void PrefixIndex::fetch(const Entry& entry) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&entry);
  for (std::size_t at = 0; at < sizeof(Entry); at += kLine) fetch_line(bytes + at);
}

// A step of each in turn: of one chain alone each block would have to be waited for.
void PrefixIndex::scout(std::span<const Announced> blocks) const {
  std::array<const Entry*, kAtOnce> ends{};
  std::size_t count = std::min(kAtOnce, blocks.size());
  for (std::size_t i = 0; i < count; ++i) {
    ends[i] = &store_[blocks[i]];
    fetch(*ends[i]);
  }
  for (std::size_t left = kMostScouted; count > 0 && left > 0; --left) {
    const std::size_t turn = left % count;
    const Entry& entry = *ends[turn];
    if (entry.state != State::kAnnounced || entry.is_next || entry.before_at == kNoPlace) {
      ends[turn] = ends[--count];
    } else {
      ends[turn] = &store_[entry.before_at];
      fetch(*ends[turn]);
    }
  }
}

// Engines that are mistaken make circles: who is in adopted_ already is not looked at again.
void PrefixIndex::add_chain(Entry& entry) {
  for (Entry* next = &entry; next != nullptr && next->state == State::kAnnounced &&
                             !next->is_next && chain_.size() < kMostChain;) {
    next->is_next = true;
    chain_.push_back(next);
    const bool is_behind_last = !adopted_.empty() && continues(*next, *adopted_.back());
    next = is_behind_last ? nullptr : find_before(*next);
  }
  adopted_.insert(adopted_.end(), chain_.rbegin(), chain_.rend());
  chain_.clear();
}

void PrefixIndex::make_adopted_visible() {
  for (std::size_t i = 0; i < adopted_.size(); ++i) {
    if (i + 2 * kAtOnce < adopted_.size()) fetch(*adopted_[i + 2 * kAtOnce]);
    if (i + kAtOnce < adopted_.size()) fetch_line(adopted_[i + kAtOnce]->block.get());
    Entry& entry = *adopted_[i];
    --announced_;
    entry.is_next = false;
    entry.state = State::kVisible;
    ++stats_.visible;
    give_id(entry);
  }
  use_new(adopted_);
  runs_.begin();
  runs_.hold_back();
  Entry* last = nullptr;
  for (Entry* entry : adopted_) {
    Entry* above = last;
    if (last == nullptr || !continues(*entry, *last)) {
      above = find_before(*entry);
    }
    runs_.add(*entry, above != nullptr && above->run > 0 ? above : nullptr);
    for (PrefixObserver* observer : observers_) observer->stored(entry->key, entry->before);
    if (entry->awaited_by > 0) order_.hold(entry->id);
    last = entry;
  }
  runs_.tell();
}

}  // namespace kvferry::cache_manager
