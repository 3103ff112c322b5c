// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <optional>
#include <span>
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

/// Items [first_item, first_item + item_count) of the job and the copies that move them.
struct CopyChunk {
  std::size_t first_item = 0;
  std::size_t item_count = 0;
  std::uint64_t size_bytes = 0;
  std::vector<CopyRun> runs;
};

/// Same for staging: blocks of one group and one region set that share a slot, in slot order.
struct StagedChunk {
  std::vector<std::size_t> items;
  ipc::GroupId group;
  ipc::RegionSet set = ipc::RegionSet::kAll;
  std::vector<std::uint32_t> blocks;
  std::uint64_t size_bytes = 0;
  std::vector<CopyRun> runs;  ///< segment is unused, device_offset counts from the slot's start.
};

struct PlanLimits {
  std::uint64_t chunk_bytes = 64ULL << 20;  ///< Ends a chunk.
  std::size_t chunk_runs = 4096;            ///< Ends a chunk.
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
    bool replicated = false;
    std::uint64_t part_offset = 0;    ///< Inside its part (replicated or sharded) of a host block.
    std::uint64_t packed_offset = 0;  ///< Inside the packed block with all regions.
  };
  explicit BlockParts(const ipc::ArenaLayout& layout);

  [[nodiscard]] std::span<const Slice> slices(ipc::GroupId group) const;
  [[nodiscard]] std::uint64_t replicated_bytes(ipc::GroupId group) const;
  [[nodiscard]] std::uint64_t sharded_bytes(ipc::GroupId group) const;

 private:
  struct Group {
    std::vector<Slice> slices;
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

/// Copies straight between arena and pool. Neighbours on both sides become one run: for block-first
/// arenas a whole block, or several.
[[nodiscard]] std::vector<CopyChunk> plan_direct(const BlockParts& parts,
                                                 std::span<const ipc::MoverItem> items,
                                                 const PlanLimits& limits);

/// Copies between staging slots of slot_bytes and the pool. Items that move nothing on this rank
/// (a replicated block that another rank stores) are in no chunk.
/// @pre every block fits a slot.
[[nodiscard]] std::vector<StagedChunk> plan_staged(const BlockParts& parts,
                                                   std::span<const ipc::MoverItem> items,
                                                   std::uint64_t slot_bytes,
                                                   const PlanLimits& limits);

}  // namespace kvferry::cache_manager
