// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/policies.hpp"
#include "eviction/race.hpp"
#include "eviction/ranked_blocks.hpp"
#include "split_map.hpp"

#include <array>
#include <cstdint>
#include <set>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// Larger caches are hedged by LRU alone: what shadows take of memory grows with the blocks, and
/// before so many are full the model has seen enough.
constexpr std::size_t kLargestOfAll = std::size_t{1} << 14U;
/// Blocks that one choice looks at for some that a new leader has not.
constexpr std::size_t kMostLookedAt = 256;

bool any_block(EntryId /*id*/) { return true; }

/// Does as the one of several policies that does best. Each of them plays a cache of its own in
/// shadow, of the same size and without data; of blocks that the leader's has not, the cache evicts
/// the one used longest ago, so that it comes to hold what the leader's does.
class HedgedPolicy final : public EvictionPolicy {
 public:
  explicit HedgedPolicy(std::size_t capacity)
      : count_(capacity > kLargestOfAll ? 2 : Race::kMost), race_(capacity, count_) {
    shadows_[0] = make_learned_policy(capacity);
    shadows_[1] = make_lru_policy();
    if (count_ == 2) return;
    shadows_[2] = make_arc_policy(capacity);
    shadows_[3] = make_s3fifo_policy(capacity);
    shadows_[4] = make_sieve_policy();
    shadows_[5] = make_lfu_policy();
  }

 private:
  /// A block that the cache has, or a shadow. It is known to shadows by its number.
  struct Block {
    std::uint64_t key = 0;
    std::uint64_t used = 0;     ///< When, of the cache's order.
    EntryId id = kNoEntry;      ///< In the cache.
    std::uint32_t shadows = 0;  ///< That have it.
    bool wanted = false;        ///< While it is free: which order it is in.
  };
  using Order = std::set<std::pair<std::uint64_t, EntryId>>;  ///< By Block::used.

  void on_use(std::span<const BlockUse> path, const std::vector<bool>& fresh) override {
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (fresh[i]) numbers_.prefetch(path[i].key);
    }
    path_.clear();
    std::size_t found = 0;
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (!fresh[i] && found == i) ++found;
      const EntryId number = fresh[i] ? enter(path[i]) : number_of_.at(path[i].id);
      path_.push_back({number, path[i].key});
    }
    for (std::size_t i = path_.size(); i-- > 0;) blocks_[path_[i].id].used = ++clock_;
    const EntryId parent = parent_of(path[0].id);
    const EntryId above = parent == kNoEntry ? kNoEntry : number_of_.at(parent);
    for (std::size_t one = 0; one < count_; ++one) hits_[one] = use_in(one, above);
    const std::size_t led = race_.leader();
    race_.add({hits_.data(), count_}, found, path.size());
    if (race_.leader() != led) looked_at_ = {};
  }
  void on_free(EntryId id) override {
    Block& block = blocks_[number_of_.at(id)];
    block.wanted = leader_has(id);
    order_of(block).emplace(block.used, id);
  }
  void on_blocked(EntryId id) override {
    const Block& block = blocks_[number_of_.at(id)];
    order_of(block).erase({block.used, id});
  }
  void on_gone(EntryId id, bool evicted) override {
    const EntryId number = number_of_.at(id);
    Block& block = blocks_[number];
    block.id = kNoEntry;
    for (std::size_t one = 0; !evicted && one < count_; ++one) {
      if (shadows_[one]->has(number)) shadows_[one]->erase(number);
    }
    if (!evicted) block.shadows = 0;
    forget_unless_used(number);
  }
  [[nodiscard]] std::optional<EntryId> choose(const MayEvict& may_evict) override {
    for (std::size_t one = 0; one < count_; ++one) shrink(one);
    while (!unwanted_.empty() && leader_has(unwanted_.begin()->second)) {
      move(unwanted_.begin()->second);  // by a leader that is new
    }
    if (const auto chosen = first_of(unwanted_, may_evict)) return chosen;
    auto at = wanted_.lower_bound(looked_at_);
    for (std::size_t left = kMostLookedAt; left > 0 && at != wanted_.end(); --left) {
      looked_at_ = *at++;
      const EntryId id = looked_at_.second;
      if (leader_has(id)) continue;
      move(id);
      if (may_evict(id)) return id;
    }
    return first_of(wanted_, may_evict);
  }

  static std::optional<EntryId> first_of(const Order& order, const MayEvict& may_evict) {
    for (const auto& [used, id] : order) {
      if (may_evict(id)) return id;
    }
    return std::nullopt;
  }

  /// @return the blocks of path_ that it would have found
  std::size_t use_in(std::size_t one, EntryId above) {
    EvictionPolicy& shadow = *shadows_[one];
    const bool has_above = above == kNoEntry || shadow.has(above);
    std::size_t hits = 0;
    while (has_above && hits < path_.size() && shadow.has(path_[hits].id)) ++hits;
    shadow.use(path_, has_above ? above : kNoEntry);
    for (const BlockUse& use : path_) blocks_[use.id].shadows |= 1U << one;
    return hits;
  }

  /// A place in the shadow's cache for each that is about to be free in the cache.
  void shrink(std::size_t one) {
    while (shadows_[one]->size() >= size()) {
      const auto evicted = shadows_[one]->evict(any_block);
      if (!evicted) return;
      Block& block = blocks_[*evicted];
      block.shadows &= ~(1U << one);
      if (block.id == kNoEntry) {
        forget_unless_used(*evicted);
      } else if (one == race_.leader() && is_free(block.id) && block.wanted) {
        move(block.id);
      }
    }
  }

  [[nodiscard]] bool leader_has(EntryId id) const {
    return ((blocks_[number_of_.at(id)].shadows >> race_.leader()) & 1U) != 0;
  }
  Order& order_of(const Block& block) { return block.wanted ? wanted_ : unwanted_; }
  /// To the other order.
  void move(EntryId id) {
    Block& block = blocks_[number_of_.at(id)];
    auto moved = order_of(block).extract({block.used, id});
    block.wanted = !block.wanted;
    order_of(block).insert(std::move(moved));
  }

  EntryId enter(const BlockUse& use) {
    const EntryId* const known = numbers_.find(use.key);
    EntryId number = known == nullptr ? kNoEntry : *known;
    if (number == kNoEntry || blocks_[number].id != kNoEntry) {  // else one that shadows have
      const bool is_another = number != kNoEntry;                // of an equal key
      if (unused_.empty()) {
        number = static_cast<EntryId>(blocks_.size());
        blocks_.add();
      } else {
        number = unused_.back();
        unused_.pop_back();
      }
      if (!is_another) numbers_[use.key] = number;
    }
    blocks_[number].key = use.key;
    blocks_[number].id = use.id;
    number_of_.make(use.id) = number;
    return number;
  }
  void forget_unless_used(EntryId number) {
    const Block& block = blocks_[number];
    if (block.id != kNoEntry || block.shadows != 0) return;
    const EntryId* const known = numbers_.find(block.key);
    if (known != nullptr && *known == number) numbers_.erase(block.key);
    blocks_[number] = {};
    unused_.push_back(number);
  }

  std::size_t count_;
  std::array<std::unique_ptr<EvictionPolicy>, Race::kMost> shadows_;
  std::array<std::size_t, Race::kMost> hits_{};  ///< Of the present request.
  Race race_;
  std::uint64_t clock_ = 0;
  PagedVector<Block> blocks_;
  std::vector<EntryId> unused_;               ///< Numbers.
  SplitMap<std::uint64_t, EntryId> numbers_;  ///< By key.
  PerBlock<EntryId> number_of_;               ///< By place in the cache.
  Order wanted_;                              ///< Free blocks that the leader's cache has, too,
  Order unwanted_;                            ///< and those that it has not.
  Order::value_type looked_at_;  ///< What is before it in wanted_ the present leader has.
  std::vector<BlockUse> path_;   ///< Of the present request, by number.
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_reuse_policy(std::size_t capacity) {
  return std::make_unique<HedgedPolicy>(capacity);
}

}  // namespace kvferry::cache_manager
