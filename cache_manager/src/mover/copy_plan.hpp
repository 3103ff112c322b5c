// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

/// From a job to copies, as pure data: offsets instead of pointers, so that planning is tested
/// without a device.
namespace kvferry::cache_manager {

/// One copy between the pool and an arena segment (or a staging slot).
struct CopyRun {
  std::uint32_t segment = 0;
  std::uint64_t device_offset = 0;  ///< In the segment; in the slot for staged runs.
  std::uint64_t pool_offset = 0;
  std::uint64_t size_bytes = 0;
  friend bool operator==(const CopyRun&, const CopyRun&) = default;
};

/// The same for rows of equal size at a constant distance on either side: one strided copy.
struct CopyRows {
  std::uint32_t segment = 0;
  std::uint64_t device_offset = 0;  ///< Of the first row; as of a run.
  std::uint64_t device_pitch = 0;
  std::uint64_t pool_offset = 0;  ///< Likewise.
  std::uint64_t pool_pitch = 0;
  std::uint64_t row_bytes = 0;
  std::uint64_t rows = 0;  ///< At least 2.
  /// From the first row's first byte in the pool to the last one's last.
  [[nodiscard]] std::uint64_t pool_bytes() const noexcept {
    return (rows - 1) * pool_pitch + row_bytes;
  }
  friend bool operator==(const CopyRows&, const CopyRows&) = default;
};

/// Parts of blocks, of one kind, that follow each other in the pool: one kernel.
struct PackedRun {
  ipc::RegionSet set = ipc::RegionSet::kSharded;  ///< Or kReplicated.
  std::size_t first = 0;                          ///< In the chunk's blocks.
  std::size_t count = 0;
  std::uint64_t pool_offset = 0;
  std::uint64_t part_bytes = 0;  ///< Of each.
  friend bool operator==(const PackedRun&, const PackedRun&) = default;
};

/// What is copied in one go, and handed over to the worker as one where it is staged.
struct PlannedChunk {
  std::vector<std::size_t> items;  ///< Of the job.
  std::uint64_t size_bytes = 0;
  std::vector<CopyRun> runs;
  std::vector<CopyRows> rows;     ///< Strided, or staged layer by layer; runs: what makes none.
  std::vector<PackedRun> packed;  ///< By kernel only, instead of runs.
  // Staged: blocks of one group and one region set, in slot order. By kernel: of one group.
  ipc::GroupId group;
  ipc::RegionSet set = ipc::RegionSet::kAll;
  std::vector<std::uint32_t> blocks;
  // Layer by layer only.
  ipc::LayerRange range;
  std::uint32_t through = 0;  ///< With this chunk and those before, all layers below it are moved.
  bool last = false;

  void clear() noexcept;  ///< Keeps the memory.
};

struct PlanLimits {
  /// Staged: chunks are packed blocks for slots of so many bytes, and runs count from the slot's
  /// start. 0: straight between arena and pool.
  std::uint64_t slot_bytes = 0;
  bool strided = false;  ///< Not staged: in rows, where a block has them.
  /// Not staged, nor layered: parts of blocks as they lie in the pool, for a kernel of ours or of
  /// the worker's.
  bool kernel = false;
  /// Layer by layer: first the lowest layer of all blocks, then as many layers at a time as make
  /// step_bytes.
  bool layered = false;
  std::uint64_t step_bytes = 2ULL << 20;
  /// Ends a chunk that is not staged; blocks that are larger go in several, but for those of
  /// kernels.
  std::uint64_t chunk_bytes = 8ULL << 20;
  std::size_t chunk_runs = 1024;    ///< Likewise, with its rows' copies.
  std::size_t chunk_blocks = 4096;  ///< Ends one that a request may name.
  /// No run crosses a multiple of this pool offset: each piece is registered on its own.
  std::uint64_t pool_piece_bytes = 64ULL << 20;
};

/// What a group's block is made of on this rank, part by part; computed once per arena.
class BlockParts {
 public:
  struct Slice {
    std::uint32_t segment = 0;
    std::uint64_t offset = 0;  ///< Of block 0.
    std::uint64_t block_stride = 0;
    std::uint64_t size_bytes = 0;
    std::uint32_t layer = 0;
    bool replicated = false;
    std::uint64_t part_offset = 0;    ///< Inside its part (replicated or sharded) of a host block.
    std::uint64_t packed_offset = 0;  ///< Inside the packed block with all regions.
  };
  /// Slices of one part that lie at one distance from each other in the arena and in the part.
  struct SliceRows {
    Slice first;
    std::uint64_t device_pitch = 0;
    std::uint64_t part_pitch = 0;
    std::uint64_t rows = 1;
  };
  explicit BlockParts(const ipc::ArenaLayout& layout);

  [[nodiscard]] std::span<const Slice> slices(ipc::GroupId group) const;
  /// All slices of a block, each once, in as few rows as was found; slices that touch on both sides
  /// are one.
  [[nodiscard]] std::span<const SliceRows> slice_rows(ipc::GroupId group) const;
  [[nodiscard]] bool has(ipc::GroupId group) const noexcept { return group.value < groups_.size(); }
  [[nodiscard]] std::uint64_t replicated_bytes(ipc::GroupId group) const;
  [[nodiscard]] std::uint64_t sharded_bytes(ipc::GroupId group) const;

 private:
  struct Group {
    std::vector<Slice> slices;
    std::vector<SliceRows> rows;
    std::uint64_t replicated_bytes = 0;
    std::uint64_t sharded_bytes = 0;
  };
  std::vector<Group> groups_;
};

/// Empty when the item may be run against this layout and pool; else what is wrong with it. Job
/// messages are input from another process: nothing is copied before this said yes.
[[nodiscard]] std::optional<ipc::Error> check_item(const ipc::MoverItem& item,
                                                   const ipc::ArenaLayout& layout,
                                                   const BlockParts& parts,
                                                   std::uint64_t pool_bytes);

/// From the items of a job to chunks, one at a time, so that a long job neither takes long to begin
/// nor holds the plan of all its copies. Items go in the order of their places in the pool:
/// neighbours on both sides become one run, for block-first arenas a whole block or several.
/// @threading one at a time. Takes no memory once it has planned a job of that size.
class CopyPlanner {
 public:
  /// Leaves out items whose result is an error already, and those that move nothing on this rank (a
  /// replicated block that another rank stores). All but the limits outlive the plan.
  /// @pre check_item() has nothing against the others; staged: every block fits a slot.
  void start(const BlockParts& parts,
             std::span<const ipc::MoverItem> items,
             std::span<const std::uint8_t> results,
             const PlanLimits& limits);
  [[nodiscard]] bool has_next() const noexcept {
    return step_ < steps_.size() && next_ < order_.size();
  }
  /// In the place of PlanLimits::chunk_bytes, from the next chunk on.
  void set_chunk_bytes(std::uint64_t bytes) noexcept { limits_.chunk_bytes = bytes; }
  /// The next chunk, in the memory of an earlier one. @pre has_next().
  void plan_next(PlannedChunk& chunk);
  /// Gives up what has not been planned: calls back for each item of it.
  template <typename Each> void drop_rest(Each each) {
    if (!has_next()) return;
    // A later step is of all blocks.
    if (step_ + 1 < steps_.size()) next_ = 0;
    for (; next_ < order_.size(); ++next_) each(order_[next_].item);
  }

 private:
  struct Place {
    std::uint32_t group = 0;
    ipc::RegionSet set = ipc::RegionSet::kAll;
    std::uint64_t pool_offset = 0;
    std::size_t item = 0;
  };

  /// A piece of a packed block that lies in one piece in the pool.
  struct Piece {
    bool replicated = false;
    std::uint64_t part_offset = 0;
    std::uint64_t packed_offset = 0;
    std::uint64_t size_bytes = 0;
  };

  void plan_steps();
  void plan_staged(PlannedChunk& chunk);
  /// pieces_ and their sum, for blocks of that kind in this step.
  void find_pieces(std::uint32_t group, ipc::RegionSet set);
  void plan_direct(PlannedChunk& chunk);
  void plan_kernel(PlannedChunk& chunk);
  /// Of the next item as much as there is room for in a chunk. True: all that was left of it.
  [[nodiscard]] bool plan_slices(const ipc::MoverItem& item, PlannedChunk& chunk);
  [[nodiscard]] bool plan_rows(const ipc::MoverItem& item, PlannedChunk& chunk);
  /// It is larger than a chunk.
  [[nodiscard]] bool is_cut(const ipc::MoverItem& item) const;
  [[nodiscard]] bool goes_in_rows(const ipc::MoverItem& item) const;

  const BlockParts* parts_ = nullptr;
  std::span<const ipc::MoverItem> items_;
  PlanLimits limits_;
  std::vector<Place> order_;
  std::vector<ipc::LayerRange> steps_;  ///< Without `layered`: one, of all layers.
  std::size_t step_ = 0;
  std::size_t next_ = 0;  ///< In order_, of this step.
  /// How far the next item is, which may go in several chunks.
  struct Progress {
    bool has_begun = false;
    bool in_rows = false;
    std::size_t whole = 0;   ///< So many slices, or rows of them,
    std::uint64_t part = 0;  ///< and of the one after them so many bytes, or rows.
  };
  Progress progress_;
  std::vector<Piece> pieces_;
  std::uint64_t pieces_bytes_ = 0;
  std::vector<std::pair<std::uint32_t, std::uint64_t>> layer_bytes_;  ///< Kept for its memory.
};

}  // namespace kvferry::cache_manager
