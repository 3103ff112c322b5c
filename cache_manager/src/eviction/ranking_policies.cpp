// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/policies.hpp"
#include "eviction/ranked_blocks.hpp"

#include <cstdint>

namespace kvferry::cache_manager {
namespace {

/// A request's blocks are touched last to first.
class LruPolicy final : public EvictionPolicy {
 private:
  void on_use(std::span<const BlockUse> path, const std::vector<bool>& /*fresh*/) override {
    for (std::size_t i = path.size(); i-- > 0;) used_.make(path[i].id) = ++clock_;
  }
  void on_free(EntryId id) override { free_.insert(used_.at(id), id); }
  void on_blocked(EntryId id) override { free_.erase(used_.at(id), id); }
  void on_gone(EntryId /*id*/, bool /*evicted*/) override {}
  [[nodiscard]] std::optional<EntryId> choose(const MayEvict& may_evict) override {
    return free_.first(may_evict);
  }

  std::uint64_t clock_ = 0;
  PerBlock<std::uint64_t> used_;
  RankedBlocks<std::uint64_t> free_;
};

/// Dynamic ageing: a block enters at the rank of what was evicted last, so that what was used often
/// long ago does not stay for ever.
class LfuPolicy final : public EvictionPolicy {
 private:
  struct Rank {
    std::uint64_t uses = 0;  ///< And the age at which it was used last.
    std::uint64_t used = 0;
    friend auto operator<=>(const Rank&, const Rank&) = default;
  };
  struct State {
    Rank rank;
    std::uint64_t uses = 0;
  };

  void on_use(std::span<const BlockUse> path, const std::vector<bool>& fresh) override {
    for (std::size_t i = path.size(); i-- > 0;) {
      State& state = states_.make(path[i].id);
      state.uses = fresh[i] ? 1 : state.uses + 1;
      state.rank = {age_ + state.uses, ++clock_};
    }
  }
  void on_free(EntryId id) override { free_.insert(states_.at(id).rank, id); }
  void on_blocked(EntryId id) override { free_.erase(states_.at(id).rank, id); }
  void on_gone(EntryId id, bool evicted) override {
    if (evicted) age_ = std::max(age_, states_.at(id).rank.uses);
  }
  [[nodiscard]] std::optional<EntryId> choose(const MayEvict& may_evict) override {
    return free_.first(may_evict);
  }

  std::uint64_t clock_ = 0;
  std::uint64_t age_ = 0;
  PerBlock<State> states_;
  RankedBlocks<Rank> free_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_lru_policy() { return std::make_unique<LruPolicy>(); }
std::unique_ptr<EvictionPolicy> make_lfu_policy() { return std::make_unique<LfuPolicy>(); }

}  // namespace kvferry::cache_manager
