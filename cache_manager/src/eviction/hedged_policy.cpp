// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/policies.hpp"
#include "eviction/race.hpp"
#include "eviction/ranked_blocks.hpp"
#include "split_map.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// Larger caches are hedged by LRU alone: what shadows take of memory grows with the blocks, and
/// before so many are full the model has seen enough.
constexpr std::size_t kLargestOfAll = std::size_t{1} << 14U;

bool any_block(EntryId /*id*/) { return true; }

/// Does what several policies say. Each of them plays a cache of its own in shadow, of the same
/// size and without data. First goes what is in the caches of those that have least to say (Race)
/// together, in none at best, and of such blocks the one used longest ago, so that the cache comes
/// to hold what is in the shadows of those that do well, and most of all what many of them have.
class HedgedPolicy final : public EvictionPolicy {
 public:
  explicit HedgedPolicy(std::size_t capacity)
      : count_(capacity > kLargestOfAll ? 2 : Race::kMost), race_(capacity, count_) {
    shadows_[0] = make_learned_policy(capacity);
    shadows_[1] = make_lru_policy();
    sets_.resize(std::size_t{1} << count_);
    by_say_.resize(sets_.size());
    std::iota(by_say_.begin(), by_say_.end(), Shadows{0});
    say_.resize(sets_.size());
    order_sets();
    if (count_ == 2) return;
    shadows_[2] = make_arc_policy(capacity);
    shadows_[3] = make_s3fifo_policy(capacity);
    shadows_[4] = make_sieve_policy();
    shadows_[5] = make_lfu_policy();
  }

 private:
  using Shadows = std::uint8_t;  ///< A bit for each.
  static_assert(Race::kMost <= std::numeric_limits<Shadows>::digits);
  /// A block that the cache has, or a shadow. It is known to shadows by its number.
  struct Block {
    std::uint64_t key = 0;
    std::uint64_t used = 0;  ///< When, of the cache's order.
    EntryId id = kNoEntry;   ///< In the cache.
    Shadows shadows = 0;     ///< That have it. While it is free it is in their set.
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
    race_.add({hits_.data(), count_}, found, path.size());
    order_sets();
  }
  void on_free(EntryId id) override {
    const Block& block = blocks_[number_of_.at(id)];
    sets_[block.shadows].emplace(block.used, id);
  }
  void on_blocked(EntryId id) override {
    const Block& block = blocks_[number_of_.at(id)];
    sets_[block.shadows].erase({block.used, id});
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
    for (const Shadows shadows : by_say_) {
      for (const auto& [used, id] : sets_[shadows]) {
        if (may_evict(id)) return id;
      }
    }
    return std::nullopt;
  }

  /// By what the shadows of each have to say together, least first.
  void order_sets() {
    const Race::Says says = race_.says();
    for (std::size_t set = 1; set < sets_.size(); ++set) {
      const auto last = static_cast<std::size_t>(std::countr_zero(set));
      say_[set] = say_[set & (set - 1)] + says.at(last);
    }
    std::sort(by_say_.begin(), by_say_.end(),
              [this](Shadows one, Shadows other) { return say_[one] < say_[other]; });
  }

  /// @return the blocks of path_ that it would have found
  std::size_t use_in(std::size_t one, EntryId above) {
    EvictionPolicy& shadow = *shadows_[one];
    const bool has_above = above == kNoEntry || shadow.has(above);
    std::size_t hits = 0;
    while (has_above && hits < path_.size() && shadow.has(path_[hits].id)) ++hits;
    shadow.use(path_, has_above ? above : kNoEntry);
    for (const BlockUse& use : path_) {
      Block& block = blocks_[use.id];  // not free, so in no set
      block.shadows = static_cast<Shadows>(block.shadows | bit_of(one));
    }
    return hits;
  }

  /// A place in the shadow's cache for each that is about to be free in the cache.
  void shrink(std::size_t one) {
    while (shadows_[one]->size() >= size()) {
      const auto evicted = shadows_[one]->evict(any_block);
      if (!evicted) return;
      Block& block = blocks_[*evicted];
      const auto left = static_cast<Shadows>(block.shadows & ~bit_of(one));
      if (block.id != kNoEntry && is_free(block.id)) {
        sets_[left].insert(sets_[block.shadows].extract({block.used, block.id}));
      }
      block.shadows = left;
      forget_unless_used(*evicted);
    }
  }

  static Shadows bit_of(std::size_t shadow) { return static_cast<Shadows>(1U << shadow); }

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
  std::vector<Order> sets_;                   ///< Free blocks, by the shadows that have them.
  std::vector<Shadows> by_say_;               ///< All sets, those first that go first.
  std::vector<double> say_;                   ///< Of each set.
  std::vector<BlockUse> path_;                ///< Of the present request, by number.
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_reuse_policy(std::size_t capacity) {
  return std::make_unique<HedgedPolicy>(capacity);
}

}  // namespace kvferry::cache_manager
