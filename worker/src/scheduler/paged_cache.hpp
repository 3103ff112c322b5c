// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/device_index.hpp"
#include "kvferry/worker/prefix_plan.hpp"
#include "scheduler/sequence.hpp"

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace kvferry::worker {

/// The device blocks of an engine, as its scheduler hands them out: block tables of sequences, and
/// the prefixes that blocks hold. Pure bookkeeping. @threading one thread.
class PagedCache {
 public:
  explicit PagedCache(const ipc::Geometry& geometry) : geometry_(geometry) {}
  [[nodiscard]] std::uint32_t tokens_per_block() const noexcept {
    return geometry_.tokens_per_block;
  }

  /// Other memory: every block is free and holds nothing. Block tables of before mean nothing.
  void remake(std::span<const std::uint32_t> group_blocks);
  [[nodiscard]] bool has_counts(std::span<const std::uint32_t> group_blocks) const;
  /// What blocks hold is found by nobody any more; who has them keeps them.
  void forget_contents();

  /// Whether a sequence of so many tokens fits when it has all blocks for itself.
  [[nodiscard]] ipc::Status check_fits(std::uint64_t tokens) const;

  enum class Admission : std::uint8_t { kReady, kLoading, kNoRoom };
  /// Blocks for all tokens that the sequence has: found in the index, free ones to load into
  /// (listed in loads), and free ones to compute. in_host: what host memory has, by group and
  /// position. Fills its block table and `computed`; kNoRoom changes nothing.
  [[nodiscard]] Admission admit(Sequence& sequence,
                                const SourceOf& in_host,
                                std::vector<LoadItem>& loads);
  /// Whether admit() would find room, whatever host memory has.
  [[nodiscard]] bool may_fit(const Sequence& sequence) const;
  /// Blocks that the fullest group could still hand out.
  [[nodiscard]] std::uint32_t least_available() const;
  /// A block in every group for its last token. False: no room; what it has, it keeps.
  [[nodiscard]] bool extend(Sequence& sequence);
  /// Lets go of what no later token reads.
  void trim(Sequence& sequence);
  /// Others find every block that is full by now. False when none became so since the last call.
  bool publish(Sequence& sequence);
  void release(Sequence& sequence);

  struct Unstored {
    StoreTarget target;
    ipc::BlockId block;
  };
  /// Published blocks of the sequence that host memory is not known to have.
  [[nodiscard]] std::vector<Unstored> unstored(const Sequence& sequence) const;
  void mark_stored(ipc::GroupId group, ipc::BlockId block);
  void acquire(ipc::GroupId group, ipc::BlockId block);
  void release(ipc::GroupId group, ipc::BlockId block);

 private:
  [[nodiscard]] GroupIndex& index_of(ipc::GroupId group) { return index_[group.value]; }
  [[nodiscard]] const GroupIndex& index_of(ipc::GroupId group) const { return index_[group.value]; }
  [[nodiscard]] PrefixPlan plan(const Sequence& sequence, const SourceOf& in_host) const;
  [[nodiscard]] bool fits(const PrefixPlan& wanted, const Sequence& sequence) const;

  const ipc::Geometry& geometry_;
  std::vector<GroupIndex> index_;
};

/// Chained hashes for the blocks that the sequence's tokens have filled by now.
void hash_full_blocks(Sequence& sequence, std::uint32_t tokens_per_block);

}  // namespace kvferry::worker
