// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/eviction_policy.hpp"
#include "kvferry/cache_manager/paged_vector.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/model/retention.hpp"

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

/// A retention that has begun.
struct Kept {
  /// Of one that lasts as long as its block; nobody waits for it.
  static constexpr ipc::TimePoint kNoEnd{
      ipc::Duration{std::numeric_limits<ipc::Duration::rep>::max()}};

  std::uint8_t priority = ipc::Retention::kOrdinary;
  ipc::TimePoint until = kNoEnd;

  /// What a block has that had one and is given another.
  [[nodiscard]] static Kept stronger(const Kept& had, const Kept& given, ipc::TimePoint now);
  [[nodiscard]] static Kept from(const ipc::Retention& retention, ipc::TimePoint now);
};

/// In which order the blocks of each partition go: a policy for each, and blocks that are retained
/// for a while. Partitions know nothing of each other. @threading one thread.
class EvictionOrder {
 public:
  /// @param policy one of eviction_policies(); else throws Exception (kInvalidArgument)
  explicit EvictionOrder(std::string_view policy);

  /// A block has this place from now on, until leave(). @param capacity blocks that the partition
  /// may well have: for its first one
  void enter(EntryId id, std::uint32_t partition, std::size_t capacity);
  /// Whether it was evicted or goes for another reason. @pre entered
  void leave(EntryId id);

  /// As the policy's, of blocks that have entered; those of each partition are a use of its own.
  void use(std::span<const BlockUse> path, EntryId above = kNoEntry);
  void continue_from(EntryId id, EntryId above);
  void hold(EntryId id);
  void let_go(EntryId id);
  /// The block's next one, in that partition; it has still to leave.
  [[nodiscard]] std::optional<EntryId> evict(std::uint32_t partition,
                                             const EvictionPolicy::MayEvict& may_evict);
  /// As the policy's, of that partition.
  void visit_evictable(std::uint32_t partition,
                       const EvictionPolicy::MayEvict& may_evict,
                       const EvictionPolicy::Visit& visit,
                       std::size_t& looks) const;

  /// @pre it has been used
  void retain(EntryId id, const Kept& kept);
  /// Some of the blocks whose time is over, those first that have been longest, are ordinary ones
  /// from now on.
  void end_retentions(ipc::TimePoint now);
  [[nodiscard]] std::size_t retained() const noexcept { return retained_; }

  /// What it has learned of a partition is forgotten. @pre it has no blocks
  void forget(std::uint32_t partition) { parts_.erase(partition); }

 private:
  /// Places of its own, so that each policy is as large as its blocks are many.
  struct Part {
    std::unique_ptr<EvictionPolicy> policy;
    PagedVector<EntryId> entries;  ///< By place.
    std::vector<EntryId> free_places;
  };
  struct Place {
    Part* part = nullptr;  ///< Null: it has not entered.
    EntryId place = kNoEntry;
    Kept kept;
  };

  [[nodiscard]] Place& at(EntryId id) { return places_[id]; }
  void stop_retaining(EntryId id, Place& place);

  std::string policy_;
  std::map<std::uint32_t, Part> parts_;
  PagedVector<Place> places_;  ///< By entry.
  std::set<std::pair<ipc::TimePoint, EntryId>> ends_;
  std::size_t retained_ = 0;
  std::vector<BlockUse> path_;  ///< Of use(), kept for its memory.
};

}  // namespace kvferry::cache_manager
