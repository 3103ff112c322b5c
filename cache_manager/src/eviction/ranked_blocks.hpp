// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/eviction_policy.hpp"
#include "kvferry/cache_manager/paged_vector.hpp"

#include <optional>
#include <set>
#include <utility>

namespace kvferry::cache_manager {

/// Blocks that may go, in the order in which they should: of equal ranks the lower place first.
template <typename Rank> class RankedBlocks {
 public:
  void insert(Rank rank, EntryId id) { blocks_.emplace(rank, id); }
  void erase(Rank rank, EntryId id) { blocks_.erase({rank, id}); }
  [[nodiscard]] bool empty() const noexcept { return blocks_.empty(); }
  [[nodiscard]] std::optional<EntryId> first(const EvictionPolicy::MayEvict& may_evict) const {
    for (const auto& [rank, id] : blocks_) {
      if (may_evict(id)) return id;
    }
    return std::nullopt;
  }

 private:
  std::set<std::pair<Rank, EntryId>> blocks_;
};

/// A value of each cached block. @pre of at(): id was given to make()
template <typename T> class PerBlock {
 public:
  T& make(EntryId id) {
    values_.grow(std::size_t{id} + 1);
    return values_[id];
  }
  [[nodiscard]] T& at(EntryId id) { return values_[id]; }
  [[nodiscard]] const T& at(EntryId id) const { return values_[id]; }

 private:
  PagedVector<T> values_;
};

}  // namespace kvferry::cache_manager
