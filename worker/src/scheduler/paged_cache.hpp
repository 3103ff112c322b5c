// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/device_index.hpp"
#include "kvferry/worker/prefix_plan.hpp"
#include "kvferry/worker/prefix_units.hpp"
#include "kvferry/worker/write_back.hpp"
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
  /// unit_blocks: of the store units in host memory.
  explicit PagedCache(const ipc::Geometry& geometry, std::uint32_t unit_blocks = 1)
      : geometry_(geometry), units_(unit_blocks) {}
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
  /// Where in host memory a planned load finds its block.
  using PlaceOf = std::function<UnitPart(ipc::GroupId group, std::uint32_t position)>;
  /// The same by a plan of now.
  [[nodiscard]] Admission admit(Sequence& sequence,
                                const PrefixPlan& wanted,
                                const PlaceOf& place_of,
                                std::vector<LoadItem>& loads);
  [[nodiscard]] PrefixPlan plan(const Sequence& sequence, const SourceOf& in_host) const;
  /// Whether admit() would find room.
  [[nodiscard]] bool fits(const PrefixPlan& wanted, const Sequence& sequence) const;
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
  /// Others find what came of a load that did not come whole, of which the sequence goes on with
  /// nothing.
  void publish_loaded(Sequence& sequence, std::span<const LoadItem> came);
  void release(Sequence& sequence);

  /// A store unit.
  struct Unstored {
    StoreTarget target;
    std::vector<ipc::BlockId> blocks;  ///< In a row; the hash of the last one is the unit's key.
    std::uint32_t position = 0;        ///< Of the first one in its sequence.
  };
  [[nodiscard]] static std::size_t count_blocks(std::span<const Unstored> units);
  /// Leaves the first ones by position, so many blocks of them at most, so that what is left are
  /// beginnings of prefixes in every group.
  static void keep_first(std::vector<Unstored>& units, std::size_t blocks);
  /// Tells the policy of each use of a unit once: what the sequence found, and what it published.
  /// A partial unit is one where its prompt ends, and with its last full block.
  void judge(Sequence& sequence, WritePolicy& policy) const;
  /// Units of the sequence's published blocks that the policy wants in host memory, and that are
  /// not known to be there. What is settled is looked at once, so that a long sequence costs no
  /// more by step than a short one. Without those that are `under_way`; the first ones by position,
  /// so that more than `most` blocks of them, if there are so many, need not be looked for.
  [[nodiscard]] std::vector<Unstored> unstored(
      Sequence& sequence,
      std::size_t most = SIZE_MAX,
      const std::function<bool(const StoreTarget&)>& under_way = nullptr) const;
  /// All of the unit is in host memory.
  void mark_stored(const Unstored& unit);
  /// What became of a load says what the unit in host memory has.
  void mark_loaded(ipc::GroupId group, const UnitPart& place);
  void mark_not_found(ipc::GroupId group, const UnitPart& place);
  [[nodiscard]] const StoreUnits& units() const noexcept { return units_; }
  void acquire(ipc::GroupId group, ipc::BlockId block);
  void release(ipc::GroupId group, ipc::BlockId block);
  /// For what was written back: it is evicted next.
  void release_as_oldest(ipc::GroupId group, ipc::BlockId block);

  /// A block that is held for a sequence before that is let in.
  struct Ahead {
    ipc::GroupId group;
    ipc::BlockId block;
    std::uint32_t position = 0;
    bool loading = false;  ///< A copier writes to it; nobody finds it.
  };
  /// Holds what the plan finds, and takes blocks for what it loads; none for what is to be
  /// computed. By position. Nothing when that would be more than one in `share` of a group's
  /// blocks, with those that are held for others, or would leave less than `spare` of a group's.
  [[nodiscard]] std::vector<Ahead> take_ahead(const Sequence& sequence,
                                              const PrefixPlan& wanted,
                                              std::span<const std::uint64_t> held,
                                              std::uint32_t share,
                                              std::uint64_t spare);
  /// It was loaded with the contents of that place of the sequence: others find it, and it is held
  /// on. place: where it came from. False when another block has them meanwhile.
  [[nodiscard]] bool land_ahead(const Sequence& sequence, Ahead& block, const UnitPart& place);

  /// What is to be stored before a sequence is let in by the plan, so that nothing is lost that the
  /// policy keeps. growth: blocks of each group more, for what is let in already. under_way: see
  /// plan_write_back(). @pre fits()
  [[nodiscard]] WriteBackPlan plan_room(const Sequence& sequence,
                                        const PrefixPlan& wanted,
                                        std::uint64_t growth,
                                        std::span<const std::uint64_t> under_way,
                                        const WritePolicy& policy);
  /// The same before one in so many blocks of every group is handed out.
  [[nodiscard]] WriteBackPlan plan_ahead(std::uint32_t share,
                                         std::span<const std::uint64_t> under_way,
                                         const WritePolicy& policy) const;
  [[nodiscard]] std::size_t group_count() const noexcept { return index_.size(); }
  /// Of the smallest group.
  [[nodiscard]] std::uint32_t least_blocks() const noexcept {
    std::uint32_t least = index_.empty() ? 0 : index_.front().block_count();
    for (const GroupIndex& group : index_) least = std::min(least, group.block_count());
    return least;
  }

 private:
  void publish(ipc::GroupId group,
               std::uint32_t position,
               TableBlock& held,
               const Sequence& sequence);
  [[nodiscard]] GroupIndex& index_of(ipc::GroupId group) { return index_[group.value]; }
  [[nodiscard]] const GroupIndex& index_of(ipc::GroupId group) const { return index_[group.value]; }

  struct HeldUnit {
    UnitStore unit;
    std::vector<ipc::BlockId> blocks;
    std::uint32_t first = 0;  ///< Place in the sequence.
    std::uint32_t last = 0;
    bool found = false;  ///< All of it.
  };
  /// Units that the sequence's blocks [from, to) make, with what others have of the same contents.
  /// @pre whole units, but for the last one
  [[nodiscard]] std::vector<HeldUnit> held_units(const Sequence& sequence,
                                                 std::size_t from,
                                                 std::size_t to) const;
  /// Where the last one ends.
  [[nodiscard]] std::size_t end_of_units(const Sequence& sequence) const;
  /// Of so many blocks, those in whole units that were published.
  [[nodiscard]] std::uint32_t published_units(const Sequence& sequence, std::size_t blocks) const;
  /// Others may go on from so many of its blocks, and from none before up to a whole unit.
  [[nodiscard]] bool may_end(const Sequence& sequence, std::size_t full) const;

  const ipc::Geometry& geometry_;
  const StoreUnits units_;
  std::vector<GroupIndex> index_;
};

/// Chained hashes for the blocks that the sequence's tokens have filled by now.
void hash_full_blocks(Sequence& sequence, std::uint32_t tokens_per_block);

}  // namespace kvferry::worker
