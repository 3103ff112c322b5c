// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Blocks of an earlier manager: announced one by one, as they lie in the pool, and then made
// visible in the order in which they were used, each behind what it continues. So the run of each
// is told once, however the blocks of a prefix came into the pool.
#include "manager/prefix_index.hpp"

#include <optional>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// Blocks before one that become visible with it, at most: a turn of the loop. What lies before
/// those comes later, and is joined then.
constexpr std::size_t kMostChain = std::size_t{1} << 14;

/// Of one root: its map is made as large as they need at once.
constexpr std::size_t kManyBlocks = 4096;

bool continues(const RunNode& node, const RunNode& before) {
  return node.before == before.key.block && node.key.group == before.key.group &&
         node.key.root == before.key.root;
}

}  // namespace

void PrefixIndex::begin_announcing(std::span<const Expected> roots) {
  is_announcing_ = true;
  std::size_t blocks = 0;
  for (const Expected& expected : roots) {
    blocks += expected.blocks;
    if (expected.blocks >= kManyBlocks) roots_[expected.root].reserve(expected.blocks);
  }
  found_.reserve(blocks);
  table_.reserve(blocks);
}

void PrefixIndex::forget_awaited_roots() {
  awaited_roots_.clear();
  // Of those whose blocks were all dropped.
  std::erase_if(roots_, [](const auto& root) { return root.second.empty(); });
  if (announced_ == 0) found_ = {};
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
  entry.announced = static_cast<Announced>(found_.size());
  name(entry, table);
  enter_slab(entry);
  found_.push_back(&entry);
  ++announced_;
  return entry.announced;
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
    const Announced one = blocks[looked_at];
    Entry* entry = one < found_.size() ? found_[one] : nullptr;
    if (entry != nullptr && !entry->is_next) add_chain(*entry);
  }
  make_adopted_visible();
  return {looked_at, adopted_.size()};
}

// Engines that are mistaken make circles: who is in adopted_ already is not looked at again.
void PrefixIndex::add_chain(Entry& entry) {
  for (Entry* next = &entry; next != nullptr && next->state == State::kAnnounced &&
                             !next->is_next && chain_.size() < kMostChain;) {
    next->is_next = true;
    chain_.push_back(next);
    const bool is_behind_last = !adopted_.empty() && continues(*next, *adopted_.back());
    next = next->before.is_zero() || is_behind_last
               ? nullptr
               : find({next->key.root, next->before, next->key.group});
  }
  adopted_.insert(adopted_.end(), chain_.rbegin(), chain_.rend());
  chain_.clear();
}

void PrefixIndex::make_adopted_visible() {
  for (Entry* entry : adopted_) {
    found_[entry->announced] = nullptr;
    --announced_;
    entry->is_next = false;
    entry->state = State::kVisible;
    ++stats_.visible;
    give_id(*entry);
  }
  use_new(adopted_);
  runs_.begin();
  Entry* last = nullptr;
  for (Entry* entry : adopted_) {
    Entry* above = last;
    if (last == nullptr || !continues(*entry, *last)) {
      above = entry->before.is_zero() ? nullptr
                                      : find({entry->key.root, entry->before, entry->key.group});
    }
    runs_.add(*entry, above != nullptr && above->run > 0 ? above : nullptr);
    for (PrefixObserver* observer : observers_) observer->stored(entry->key, entry->before);
    if (entry->awaited_by > 0) order_.hold(entry->id);
    last = entry;
  }
}

}  // namespace kvferry::cache_manager
