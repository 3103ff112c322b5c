// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/policies.hpp"
#include "eviction/ranked_blocks.hpp"
#include "eviction/remembered_keys.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>

namespace kvferry::cache_manager {
namespace {

using Queue = std::list<EntryId>;

/// A small queue that most blocks leave without having been used again, and a main one in which
/// what is used goes round.
class S3FifoPolicy final : public EvictionPolicy {
 public:
  explicit S3FifoPolicy(std::size_t capacity)
      : capacity_(capacity), small_share_(std::max<std::size_t>(1, capacity / 10)) {}

 private:
  static constexpr std::uint8_t kMostUses = 3;
  struct State {
    Queue::iterator at{};
    std::uint8_t uses = 0;  ///< Since it entered its queue, or went round.
    bool in_main = false;
  };

  void on_use(std::span<const BlockUse> path, const std::vector<bool>& fresh) override {
    for (std::size_t i = path.size(); i-- > 0;) {
      State& state = states_.make(path[i].id);
      if (!fresh[i]) {
        state.uses = std::min<std::uint8_t>(kMostUses, state.uses + 1);
        continue;
      }
      state.uses = 0;
      state.in_main = gone_.erase(path[i].key);
      Queue& queue = state.in_main ? main_ : small_;
      state.at = queue.insert(queue.end(), path[i].id);
    }
  }
  void on_free(EntryId /*id*/) override {}
  void on_blocked(EntryId /*id*/) override {}
  void on_gone(EntryId id, bool evicted) override {
    const State& state = states_.at(id);
    (state.in_main ? main_ : small_).erase(state.at);
    if (!evicted || state.in_main) return;
    gone_.insert(key_of(id));
    while (gone_.size() > capacity_) gone_.drop_oldest();
  }

  [[nodiscard]] std::optional<EntryId> choose(const MayEvict& may_evict) override {
    if (const auto chosen = choose_small(may_evict, small_share_)) return chosen;
    if (const auto chosen = choose_main(may_evict)) return chosen;
    return choose_small(may_evict, /*at_least=*/0);
  }

  /// @param at_least blocks in the queue, while one is chosen
  std::optional<EntryId> choose_small(const MayEvict& may_evict, std::size_t at_least) {
    for (std::size_t left = small_.size(); left > 0 && small_.size() >= at_least; --left) {
      const EntryId id = small_.front();
      State& state = states_.at(id);
      if (state.uses > 1) {
        main_.splice(main_.end(), small_, state.at);
        state.in_main = true;
        state.uses = 0;
      } else if (is_free(id) && may_evict(id)) {
        return id;
      } else {
        small_.splice(small_.end(), small_, state.at);
      }
    }
    return std::nullopt;
  }

  std::optional<EntryId> choose_main(const MayEvict& may_evict) {
    for (std::size_t left = main_.size() * (kMostUses + 2U); left > 0; --left) {
      const EntryId id = main_.front();
      State& state = states_.at(id);
      if (is_free(id) && state.uses == 0 && may_evict(id)) return id;
      if (is_free(id) && state.uses > 0) --state.uses;
      main_.splice(main_.end(), main_, state.at);
    }
    return std::nullopt;
  }

  std::size_t capacity_;
  std::size_t small_share_;
  Queue small_;
  Queue main_;
  PerBlock<State> states_;
  RememberedKeys gone_;  ///< From the small queue.
};

/// One queue, and a hand that goes from old to new and spares what was used since it came by.
class SievePolicy final : public EvictionPolicy {
 private:
  struct State {
    Queue::iterator at{};
    bool used = false;
  };

  void on_use(std::span<const BlockUse> path, const std::vector<bool>& fresh) override {
    for (std::size_t i = path.size(); i-- > 0;) {
      State& state = states_.make(path[i].id);
      state.used = !fresh[i];
      if (fresh[i]) state.at = queue_.insert(queue_.end(), path[i].id);
    }
  }
  void on_free(EntryId /*id*/) override {}
  void on_blocked(EntryId /*id*/) override {}
  void on_gone(EntryId id, bool /*evicted*/) override {
    const auto at = states_.at(id).at;
    if (hand_ == at) ++hand_;
    queue_.erase(at);
  }

  [[nodiscard]] std::optional<EntryId> choose(const MayEvict& may_evict) override {
    for (std::size_t left = 2 * queue_.size(); left > 0; --left) {
      if (hand_ == queue_.end()) hand_ = queue_.begin();
      State& state = states_.at(*hand_);
      if (state.used) {
        state.used = false;
      } else if (is_free(*hand_) && may_evict(*hand_)) {
        return *hand_;
      }
      ++hand_;
    }
    return std::nullopt;
  }

  Queue queue_;  ///< Oldest first.
  Queue::iterator hand_ = queue_.end();
  PerBlock<State> states_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_s3fifo_policy(std::size_t capacity) {
  return std::make_unique<S3FifoPolicy>(capacity);
}
std::unique_ptr<EvictionPolicy> make_sieve_policy() { return std::make_unique<SievePolicy>(); }

}  // namespace kvferry::cache_manager
