// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/eviction_policy.hpp"

#include "eviction/policies.hpp"
#include "kvferry/ipc/base/check.hpp"

#include <fmt/ranges.h>

#include <array>
#include <unordered_map>

namespace kvferry::cache_manager {

void EvictionPolicy::use(std::span<const BlockUse> path, EntryId above) {
  if (path.empty()) return;
  ++request_;
  steps_left_ = kMostSteps;
  distinct_.clear();
  fresh_.clear();
  EntryId parent = above;
  for (const BlockUse& use : path) {
    const bool is_fresh = !has(use.id);
    if (!is_fresh && blocks_[use.id].request == request_) {  // twice in one request
      parent = use.id;
      continue;
    }
    if (is_fresh) {
      enter(use);
    } else {
      block(use.id);
    }
    blocks_[use.id].request = request_;
    distinct_.push_back(use);
    fresh_.push_back(is_fresh);
    // Nothing continues a block that has just entered, so that it makes no circle.
    if (is_fresh || (parent_of(use.id) == kNoEntry && !may_be_before(use.id, parent))) {
      link(use.id, parent);
    }
    parent = use.id;
  }
  on_use(distinct_, fresh_);
  for (const BlockUse& use : distinct_) unblock(use.id);
}

void EvictionPolicy::continue_from(EntryId id, EntryId above) {
  KVFERRY_CHECK(has(id) && has(above), "a block that is not cached continues nothing");
  if (parent_of(id) == kNoEntry && !may_be_before(id, above)) link(id, above);
}

void EvictionPolicy::enter(const BlockUse& use) {
  KVFERRY_CHECK(use.id != kNoEntry, "a block without a place");
  blocks_.grow(std::size_t{use.id} + 1);
  Block& entered = blocks_[use.id];
  entered.key = use.key;
  entered.parent = kNoEntry;
  entered.blockers = 1;  // until the request's end
  entered.priority = ipc::Retention::kOrdinary;
  entered.cached = true;
  ++size_;
}

// A request may name a block twice, or in another order than the one before: never a circle.
bool EvictionPolicy::may_be_before(EntryId id, EntryId other) {
  for (; has(other); other = parent_of(other)) {
    if (other == id || steps_left_ == 0) return true;
    --steps_left_;
  }
  return false;
}

void EvictionPolicy::link(EntryId id, EntryId parent) {
  if (!has(parent) || parent == id) return;
  blocks_[id].parent = parent;
  blocks_[id].parent_life = blocks_[parent].life;
  block(parent);
}

EntryId EvictionPolicy::parent_of(EntryId id) const {
  const Block& block = blocks_[id];
  if (block.parent == kNoEntry) return kNoEntry;
  const Block& parent = blocks_[block.parent];
  return parent.cached && parent.life == block.parent_life ? block.parent : kNoEntry;
}

void EvictionPolicy::block(EntryId id) {
  if (blocks_[id].blockers == 0) leave_free(id);
  ++blocks_[id].blockers;
}

void EvictionPolicy::unblock(EntryId id) {
  KVFERRY_CHECK(blocks_[id].blockers > 0, "a block is let go that nobody holds");
  if (--blocks_[id].blockers == 0) enter_free(id);
}

void EvictionPolicy::enter_free(EntryId id) {
  Block& block = blocks_[id];
  if (block.priority == ipc::Retention::kOrdinary) {
    ++free_;
    on_free(id);
  } else {
    block.freed = ++freed_;
    ranked_.emplace(block.priority, block.freed, id);
  }
}

void EvictionPolicy::leave_free(EntryId id) {
  const Block& block = blocks_[id];
  if (block.priority == ipc::Retention::kOrdinary) {
    --free_;
    on_blocked(id);
  } else {
    ranked_.erase({block.priority, block.freed, id});
  }
}

void EvictionPolicy::set_priority(EntryId id, std::uint8_t priority) {
  KVFERRY_CHECK(has(id), "a block gets a priority that is not cached");
  Block& block = blocks_[id];
  if (block.priority == priority) return;
  const bool is_unblocked = block.blockers == 0;
  if (is_unblocked) leave_free(id);
  block.priority = priority;
  if (is_unblocked) enter_free(id);
}

void EvictionPolicy::hold(EntryId id) {
  KVFERRY_CHECK(has(id), "a block is held that is not cached");
  block(id);
}

void EvictionPolicy::let_go(EntryId id) {
  KVFERRY_CHECK(has(id), "a block is let go that is not cached");
  unblock(id);
}

void EvictionPolicy::visit_evictable(const MayEvict& may_evict,
                                     const Visit& visit,
                                     std::size_t& looks) const {
  std::unordered_map<EntryId, std::uint32_t> blockers;  // Left, of blocks that have several.
  for (std::size_t place = 0; place < blocks_.size() && looks > 0; ++place) {
    --looks;
    if (!blocks_[place].cached || blocks_[place].blockers > 0) continue;
    for (auto id = static_cast<EntryId>(place); id != kNoEntry && looks > 0 && may_evict(id);) {
      --looks;
      if (!visit(id)) return;
      const EntryId parent = parent_of(id);
      if (parent != kNoEntry && blocks_[parent].blockers > 1 &&
          --blockers.try_emplace(parent, blocks_[parent].blockers).first->second > 0) {
        break;
      }
      id = parent;
    }
  }
}

void EvictionPolicy::erase(EntryId id) {
  KVFERRY_CHECK(has(id), "a block is erased that is not cached");
  if (blocks_[id].blockers == 0) leave_free(id);
  remove(id, /*evicted=*/false);
}

void EvictionPolicy::remove(EntryId id, bool evicted) {
  const EntryId parent = parent_of(id);
  on_gone(id, evicted);
  Block& block = blocks_[id];
  block.cached = false;
  ++block.life;
  --size_;
  if (parent != kNoEntry) unblock(parent);
}

std::optional<EntryId> EvictionPolicy::evict(const MayEvict& may_evict) {
  std::optional<EntryId> chosen = choose_ranked(/*below_ordinary=*/true, may_evict);
  // Without a free block some policies would look at all there are.
  if (!chosen && free_ > 0) chosen = choose(may_evict);
  if (!chosen) chosen = choose_ranked(/*below_ordinary=*/false, may_evict);
  if (chosen) {
    leave_free(*chosen);
    remove(*chosen, /*evicted=*/true);
  }
  return chosen;
}

std::optional<EntryId> EvictionPolicy::choose_ranked(bool below_ordinary,
                                                     const MayEvict& may_evict) const {
  constexpr Ranked kFirstOrdinary{ipc::Retention::kOrdinary, 0, 0};
  const auto middle = ranked_.lower_bound(kFirstOrdinary);
  const auto end = below_ordinary ? middle : ranked_.end();
  for (auto at = below_ordinary ? ranked_.begin() : middle; at != end; ++at) {
    if (const EntryId id = std::get<EntryId>(*at); may_evict(id)) return id;
  }
  return std::nullopt;
}

namespace {
constexpr std::array<std::string_view, 6> kNames = {"reuse",  "lru",   "arc",
                                                    "s3fifo", "sieve", "lfu"};
}  // namespace

std::span<const std::string_view> eviction_policies() { return kNames; }

ipc::Result<std::unique_ptr<EvictionPolicy>> make_eviction_policy(std::string_view name,
                                                                  std::size_t capacity) {
  KVFERRY_CHECK(capacity > 0, "a cache of no blocks");
  if (name == "reuse") return make_reuse_policy(capacity);
  if (name == "lru") return make_lru_policy();
  if (name == "arc") return make_arc_policy(capacity);
  if (name == "s3fifo") return make_s3fifo_policy(capacity);
  if (name == "sieve") return make_sieve_policy();
  if (name == "lfu") return make_lfu_policy();
  return KVFERRY_ERROR(kInvalidArgument, "'{}' is none of {}", name, fmt::join(kNames, "|"));
}

}  // namespace kvferry::cache_manager
