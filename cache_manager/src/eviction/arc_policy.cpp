// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/policies.hpp"
#include "eviction/ranked_blocks.hpp"
#include "eviction/remembered_keys.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

namespace kvferry::cache_manager {
namespace {

/// Blocks that were used once and blocks that were used again, each by recency, and as many of
/// either as what was evicted too early says.
class ArcPolicy final : public EvictionPolicy {
 public:
  explicit ArcPolicy(std::size_t capacity) : capacity_(static_cast<double>(capacity)) {}

 private:
  enum Side : std::uint8_t { kOnce = 0, kAgain = 1 };
  struct State {
    std::uint64_t used = 0;
    Side side = kOnce;
  };

  void on_use(std::span<const BlockUse> path, const std::vector<bool>& fresh) override {
    for (std::size_t i = path.size(); i-- > 0;) {
      State& state = states_.make(path[i].id);
      if (!fresh[i]) --cached_[state.side];
      state.side = fresh[i] && !remembers(path[i].key) ? kOnce : kAgain;
      state.used = ++clock_;
      ++cached_[state.side];
    }
  }

  /// A miss that a larger share of its side would have been a hit.
  bool remembers(std::uint64_t key) {
    const auto once = static_cast<double>(gone_[kOnce].size());
    const auto again = static_cast<double>(gone_[kAgain].size());
    if (gone_[kOnce].erase(key)) {
      share_ = std::min(capacity_, share_ + std::max(1.0, again / once));
    } else if (gone_[kAgain].erase(key)) {
      share_ = std::max(0.0, share_ - std::max(1.0, once / again));
    } else {
      return false;
    }
    return true;
  }

  void on_free(EntryId id) override { free_[states_.at(id).side].insert(states_.at(id).used, id); }
  void on_blocked(EntryId id) override {
    free_[states_.at(id).side].erase(states_.at(id).used, id);
  }

  void on_gone(EntryId id, bool evicted) override {
    const Side side = states_.at(id).side;
    --cached_[side];
    if (!evicted) return;
    gone_[side].insert(key_of(id));
    const auto capacity = static_cast<std::size_t>(capacity_);
    while (cached_[kOnce] + gone_[kOnce].size() > capacity && gone_[kOnce].size() > 0) {
      gone_[kOnce].drop_oldest();
    }
    while (size() + gone_[kOnce].size() + gone_[kAgain].size() > 2 * capacity &&
           gone_[kAgain].size() > 0) {
      gone_[kAgain].drop_oldest();
    }
  }

  [[nodiscard]] std::optional<EntryId> choose(const MayEvict& may_evict) override {
    const Side first = static_cast<double>(cached_[kOnce]) > share_ ? kOnce : kAgain;
    if (const auto chosen = free_[first].first(may_evict)) return chosen;
    return free_[first == kOnce ? kAgain : kOnce].first(may_evict);
  }

  double capacity_;
  double share_ = 0;  ///< Of blocks used once, that they may have.
  std::uint64_t clock_ = 0;
  PerBlock<State> states_;
  std::array<std::size_t, 2> cached_{};
  std::array<RankedBlocks<std::uint64_t>, 2> free_;
  std::array<RememberedKeys, 2> gone_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_arc_policy(std::size_t capacity) {
  return std::make_unique<ArcPolicy>(capacity);
}

}  // namespace kvferry::cache_manager
