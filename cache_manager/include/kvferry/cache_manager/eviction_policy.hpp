// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/paged_vector.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/retention.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <tuple>
#include <vector>

/// Which block of a cache of prefixes goes when another one needs its place.
namespace kvferry::cache_manager {

/// A block that is cached, by its place in the index. Places are used again once they are free.
using EntryId = std::uint32_t;
inline constexpr EntryId kNoEntry = std::numeric_limits<EntryId>::max();

/// One block of a request.
struct BlockUse {
  EntryId id = kNoEntry;
  std::uint64_t key = 0;  ///< The same for the same block when it comes back later.
};

/// Chooses what to evict. Blocks form trees, as prefixes do: a block is of use only where all those
/// before it are there. So of those that it knows to continue each other the last ones are evicted
/// first, and no eviction leaves a gap. What a policy remembers of blocks that are gone is bounded
/// by its capacity (reuse: eight times that many blocks, at most a million).
///
/// Blocks have priorities, those of a lower one go first; what a block continues stays as long as
/// the block. Which block goes of those that have the ordinary priority the policy says; of any
/// other priority the one that was used longest ago.
/// @threading one thread.
class EvictionPolicy {
 public:
  /// Whether a block may go now.
  using MayEvict = std::function<bool(EntryId)>;

  EvictionPolicy(const EvictionPolicy&) = delete;
  EvictionPolicy& operator=(const EvictionPolicy&) = delete;
  virtual ~EvictionPolicy() = default;

  /// One request uses the blocks of one prefix, first to last. Those that are not cached yet are
  /// from now on; those of which it was not known what they continue continue the one before.
  /// Time is counted in blocks used.
  /// @param above what path continues: cached, or kNoEntry
  void use(std::span<const BlockUse> path, EntryId above = kNoEntry);
  /// It is known now that a cached block continues another cached one. Nothing where it continues
  /// one already, or that would be a circle, or too much was looked at for circles since the last
  /// use.
  void continue_from(EntryId id, EntryId above);
  /// The block cannot go until it has been let go as often as it was held. @pre cached
  void hold(EntryId id);
  /// @pre held
  void let_go(EntryId id);
  /// Until the block is gone, or the next call. @pre cached
  void set_priority(EntryId id, std::uint8_t priority);
  /// It is gone for another reason than eviction, with its holds. What continued it stays, and
  /// continues nothing. @pre cached
  void erase(EntryId id);
  /// Chooses a block, and forgets that it is cached; nothing where none may go.
  [[nodiscard]] std::optional<EntryId> evict(const MayEvict& may_evict);
  /// Whether to go on.
  using Visit = std::function<bool(EntryId)>;
  /// The blocks that evict() could choose one after another until none is left, each behind what
  /// continues it, and otherwise in no order. Nothing changes. looks: at so many places at most;
  /// what is left of it. 0: there may have been more.
  void visit_evictable(const MayEvict& may_evict, const Visit& visit, std::size_t& looks) const;

  [[nodiscard]] bool has(EntryId id) const noexcept {
    return id < blocks_.size() && blocks_[id].cached;
  }
  /// Blocks.
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 protected:
  EvictionPolicy() = default;

  [[nodiscard]] std::uint64_t key_of(EntryId id) const { return blocks_[id].key; }
  [[nodiscard]] EntryId parent_of(EntryId id) const;
  /// Nothing continues it, nobody holds it, and it is of the ordinary priority: the policy's.
  [[nodiscard]] bool is_free(EntryId id) const {
    return blocks_[id].blockers == 0 && blocks_[id].priority == ipc::Retention::kOrdinary;
  }

 private:
  struct Block {
    std::uint64_t key = 0;
    EntryId parent = kNoEntry;
    std::uint32_t parent_life = 0;  ///< Of the parent's place, which may be another block's now.
    std::uint32_t life = 0;
    std::uint32_t blockers = 0;  ///< Blocks that continue it, and holds.
    std::uint64_t request = 0;   ///< That used it last.
    bool cached = false;
    std::uint8_t priority = ipc::Retention::kOrdinary;
    std::uint64_t freed = 0;  ///< Of another priority: when it became free, in the order of that.
  };
  /// Priority, when it became free, which.
  using Ranked = std::tuple<std::uint8_t, std::uint64_t, EntryId>;

  /// A request's blocks, each once, all cached now and none a candidate; fresh: not cached before.
  virtual void on_use(std::span<const BlockUse> path, const std::vector<bool>& fresh) = 0;
  /// From now on it may be chosen, and not any more.
  virtual void on_free(EntryId id) = 0;
  virtual void on_blocked(EntryId id) = 0;
  /// No longer cached; it is free when it is evicted, and may be whatever it is otherwise.
  virtual void on_gone(EntryId id, bool evicted) = 0;
  /// The best of the free blocks that may go.
  [[nodiscard]] virtual std::optional<EntryId> choose(const MayEvict& may_evict) = 0;

  void enter(const BlockUse& use);
  /// It is other, or something that other continues, or that would take too long to tell.
  [[nodiscard]] bool may_be_before(EntryId id, EntryId other);
  void link(EntryId id, EntryId parent);
  void block(EntryId id);
  void unblock(EntryId id);
  /// It has no blockers any more, or gets its first one.
  void enter_free(EntryId id);
  void leave_free(EntryId id);
  /// Of the free blocks of other priorities than the ordinary one, the first that may go.
  [[nodiscard]] std::optional<EntryId> choose_ranked(bool below_ordinary,
                                                     const MayEvict& may_evict) const;
  void remove(EntryId id, bool evicted);

  PagedVector<Block> blocks_;
  /// Blocks that one request is looked at for circles.
  static constexpr std::uint32_t kMostSteps = 16'384;
  std::uint64_t request_ = 0;
  std::uint32_t steps_left_ = 0;
  std::vector<BlockUse> distinct_;  ///< Of use(), as fresh_ is; kept for their memory.
  std::vector<bool> fresh_;
  std::size_t size_ = 0;
  std::size_t free_ = 0;     ///< Blocks that the policy may choose.
  std::set<Ranked> ranked_;  ///< Free blocks of the other priorities.
  std::uint64_t freed_ = 0;
};

/// What policies are called, in the order of help texts:
/// - reuse: ours, and the default; docs/adr/0009-eviction-by-learned-reuse.md
/// - lru: least recently used
/// - arc: Megiddo, Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003
/// - s3fifo: Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023
/// - sieve: Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024
/// - lfu: least frequently used, with ageing (LFU-DA: Arlitt et al., "Evaluating Content Management
///   Techniques for Web Proxy Caches", 2000)
/// Whatever they say, candidates are only blocks that nothing continues.
[[nodiscard]] std::span<const std::string_view> eviction_policies();
inline constexpr std::string_view kDefaultEvictionPolicy = "reuse";

/// @param capacity blocks that the cache holds, at least 1: what policies size themselves by
/// @return kInvalidArgument: no such policy
[[nodiscard]] ipc::Result<std::unique_ptr<EvictionPolicy>> make_eviction_policy(
    std::string_view name, std::size_t capacity);

}  // namespace kvferry::cache_manager
