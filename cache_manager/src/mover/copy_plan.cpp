// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/copy_plan.hpp"

#include "kvferry/ipc/base/size.hpp"

#include <algorithm>
#include <map>
#include <tuple>

namespace kvferry::cache_manager {
namespace {

using ipc::GroupId;
using ipc::MoverItem;
using ipc::RegionSet;

// Appends a copy, joined to the previous one where both sides continue it, cut at pool pieces.
void append_run(std::vector<CopyRun>& runs, CopyRun run, std::uint64_t pool_piece_bytes) {
  while (run.size_bytes > 0) {
    const std::uint64_t to_boundary = pool_piece_bytes - run.pool_offset % pool_piece_bytes;
    const std::uint64_t size = std::min(run.size_bytes, to_boundary);
    const bool continues =
        !runs.empty() && runs.back().segment == run.segment &&
        runs.back().device_offset + runs.back().size_bytes == run.device_offset &&
        runs.back().pool_offset + runs.back().size_bytes == run.pool_offset &&
        run.pool_offset % pool_piece_bytes != 0;
    if (continues) {
      runs.back().size_bytes += size;
    } else {
      runs.push_back({run.segment, run.device_offset, run.pool_offset, size});
    }
    run.device_offset += size;
    run.pool_offset += size;
    run.size_bytes -= size;
  }
}

bool in_pool(std::uint64_t offset, std::uint64_t size, std::uint64_t pool_bytes) {
  std::uint64_t end = 0;
  return ipc::checked_add(offset, size, end) && end <= pool_bytes;
}

}  // namespace

BlockParts::BlockParts(const ipc::ArenaLayout& layout) : groups_(layout.groups.size()) {
  for (const bool replicated : {true, false}) {
    for (const ipc::Region& region : layout.regions) {
      if (region.replicated != replicated) continue;
      Group& group = groups_.at(region.group.value);
      std::uint64_t& part_bytes = replicated ? group.replicated_bytes : group.sharded_bytes;
      Slice slice;
      slice.segment = region.segment;
      slice.offset = region.offset;
      slice.block_stride = region.block_stride;
      slice.size_bytes = region.block_bytes;
      slice.replicated = replicated;
      slice.part_offset = part_bytes;
      slice.packed_offset = replicated ? part_bytes : group.replicated_bytes + part_bytes;
      part_bytes += region.block_bytes;
      group.slices.push_back(slice);
    }
  }
}

std::span<const BlockParts::Slice> BlockParts::slices(GroupId group) const {
  return groups_.at(group.value).slices;
}

std::uint64_t BlockParts::replicated_bytes(GroupId group) const {
  return groups_.at(group.value).replicated_bytes;
}

std::uint64_t BlockParts::sharded_bytes(GroupId group) const {
  return groups_.at(group.value).sharded_bytes;
}

std::optional<ipc::Error> check_item(const MoverItem& item,
                                     const ipc::ArenaLayout& layout,
                                     const BlockParts& parts,
                                     std::uint64_t pool_bytes) {
  if (item.group.value >= layout.groups.size()) {
    return KVFERRY_ERROR(kInvalidArgument, "group {} does not exist, the arena has {}",
                         item.group.value, layout.groups.size());
  }
  const std::uint32_t block_count = layout.groups[item.group.value].block_count;
  if (item.block.value >= block_count) {
    return KVFERRY_ERROR(kInvalidArgument, "block {} of group {} is out of range, the arena has {}",
                         item.block.value, item.group.value, block_count);
  }
  const std::uint64_t replicated = parts.replicated_bytes(item.group);
  const std::uint64_t sharded = parts.sharded_bytes(item.group);
  if ((item.with_replicated && replicated > 0 &&
       !in_pool(item.replicated_offset, replicated, pool_bytes)) ||
      (sharded > 0 && !in_pool(item.shard_offset, sharded, pool_bytes))) {
    return KVFERRY_ERROR(
        kInvalidArgument, "block {} of group {}: pool offsets {} and {} leave the pool of {} bytes",
        item.block.value, item.group.value, item.replicated_offset, item.shard_offset, pool_bytes);
  }
  return std::nullopt;
}

std::vector<CopyChunk> plan_direct(const BlockParts& parts,
                                   std::span<const MoverItem> items,
                                   const PlanLimits& limits) {
  std::vector<CopyChunk> chunks;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (chunks.empty() || chunks.back().size_bytes >= limits.chunk_bytes ||
        chunks.back().runs.size() >= limits.chunk_runs) {
      chunks.emplace_back();
      chunks.back().first_item = i;
    }
    CopyChunk& chunk = chunks.back();
    ++chunk.item_count;
    const MoverItem& item = items[i];
    for (const BlockParts::Slice& slice : parts.slices(item.group)) {
      if (slice.replicated && !item.with_replicated) continue;
      const std::uint64_t base = slice.replicated ? item.replicated_offset : item.shard_offset;
      append_run(chunk.runs,
                 {slice.segment, slice.offset + item.block.value * slice.block_stride,
                  base + slice.part_offset, slice.size_bytes},
                 limits.pool_piece_bytes);
      chunk.size_bytes += slice.size_bytes;
    }
  }
  return chunks;
}

std::vector<StagedChunk> plan_staged(const BlockParts& parts,
                                     std::span<const MoverItem> items,
                                     std::uint64_t slot_bytes,
                                     const PlanLimits& limits) {
  std::vector<StagedChunk> chunks;
  std::map<std::pair<std::uint32_t, RegionSet>, std::size_t> open;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const MoverItem& item = items[i];
    const std::uint64_t replicated = item.with_replicated ? parts.replicated_bytes(item.group) : 0;
    const std::uint64_t sharded = parts.sharded_bytes(item.group);
    const std::uint64_t packed = replicated + sharded;
    if (packed == 0) continue;
    const RegionSet set = item.with_replicated ? RegionSet::kAll : RegionSet::kSharded;
    const auto key = std::pair(item.group.value, set);
    auto found = open.find(key);
    if (found == open.end() || chunks[found->second].size_bytes + packed > slot_bytes) {
      chunks.emplace_back();
      chunks.back().group = item.group;
      chunks.back().set = set;
      found = open.insert_or_assign(key, chunks.size() - 1).first;
    }
    StagedChunk& chunk = chunks[found->second];
    if (replicated > 0) {
      append_run(chunk.runs, {0, chunk.size_bytes, item.replicated_offset, replicated},
                 limits.pool_piece_bytes);
    }
    if (sharded > 0) {
      append_run(chunk.runs, {0, chunk.size_bytes + replicated, item.shard_offset, sharded},
                 limits.pool_piece_bytes);
    }
    chunk.items.push_back(i);
    chunk.blocks.push_back(item.block.value);
    chunk.size_bytes += packed;
  }
  return chunks;
}

}  // namespace kvferry::cache_manager
