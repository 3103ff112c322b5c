// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/copy_plan.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "mover/slice_rows.hpp"

#include <algorithm>
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

// Appends rows, cut at pool pieces: a row that crosses one is copied by itself.
void append_rows(PlannedChunk& chunk, CopyRows left, std::uint64_t pool_piece_bytes) {
  while (left.rows > 0) {
    const std::uint64_t to_boundary = pool_piece_bytes - left.pool_offset % pool_piece_bytes;
    std::uint64_t rows = 1;
    if (left.rows > 1 && left.row_bytes <= to_boundary) {
      rows = std::min(left.rows, 1 + (to_boundary - left.row_bytes) / left.pool_pitch);
    }
    if (rows > 1) {
      chunk.rows.push_back(left);
      chunk.rows.back().rows = rows;
    } else {
      append_run(chunk.runs, {left.segment, left.device_offset, left.pool_offset, left.row_bytes},
                 pool_piece_bytes);
    }
    left.device_offset += rows * left.device_pitch;
    left.pool_offset += rows * left.pool_pitch;
    left.rows -= rows;
  }
}

std::uint64_t device_offset(const BlockParts::Slice& slice, const MoverItem& item) {
  return slice.offset + item.block.value * slice.block_stride;
}

std::uint64_t pool_offset(const BlockParts::Slice& slice, const MoverItem& item) {
  return (slice.replicated ? item.replicated_offset : item.shard_offset) + slice.part_offset;
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
  for (Group& group : groups_) group.rows = find_slice_rows(group.slices);
}

std::span<const BlockParts::Slice> BlockParts::slices(GroupId group) const {
  return groups_.at(group.value).slices;
}

std::span<const BlockParts::SliceRows> BlockParts::slice_rows(GroupId group) const {
  return groups_.at(group.value).rows;
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

void PlannedChunk::clear() noexcept {
  items.clear();
  size_bytes = 0;
  runs.clear();
  rows.clear();
  blocks.clear();
}

void CopyPlanner::start(const BlockParts& parts,
                        std::span<const MoverItem> items,
                        std::span<const std::uint8_t> results,
                        const PlanLimits& limits) {
  parts_ = &parts;
  items_ = items;
  limits_ = limits;
  order_.clear();
  next_ = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (results[i] != 0) continue;
    const MoverItem& item = items[i];
    const std::uint64_t sharded = parts.sharded_bytes(item.group);
    const bool replicated = item.with_replicated && parts.replicated_bytes(item.group) > 0;
    if (sharded == 0 && !replicated) continue;
    order_.push_back({item.group.value,
                      item.with_replicated ? RegionSet::kAll : RegionSet::kSharded,
                      sharded > 0 ? item.shard_offset : item.replicated_offset, i});
  }
  const bool staged = limits.slot_bytes > 0;
  std::sort(order_.begin(), order_.end(), [staged](const Place& a, const Place& b) {
    if (staged && (a.group != b.group || a.set != b.set)) {
      return std::tie(a.group, a.set) < std::tie(b.group, b.set);
    }
    return std::tie(a.pool_offset, a.item) < std::tie(b.pool_offset, b.item);
  });
}

void CopyPlanner::plan_next(PlannedChunk& chunk) {
  chunk.clear();
  if (limits_.slot_bytes > 0) {
    plan_staged(chunk);
  } else {
    plan_direct(chunk);
  }
}

void CopyPlanner::plan_direct(PlannedChunk& chunk) {
  for (; has_next() && chunk.size_bytes < limits_.chunk_bytes &&
         chunk.runs.size() + chunk.rows.size() < limits_.chunk_runs;
       ++next_) {
    const MoverItem& item = items_[order_[next_].item];
    if (limits_.strided) {
      plan_rows(item, chunk);
    } else {
      plan_slices(item, chunk);
    }
    chunk.items.push_back(order_[next_].item);
  }
}

void CopyPlanner::plan_slices(const MoverItem& item, PlannedChunk& chunk) const {
  for (const BlockParts::Slice& slice : parts_->slices(item.group)) {
    if (slice.replicated && !item.with_replicated) continue;
    append_run(
        chunk.runs,
        {slice.segment, device_offset(slice, item), pool_offset(slice, item), slice.size_bytes},
        limits_.pool_piece_bytes);
    chunk.size_bytes += slice.size_bytes;
  }
}

void CopyPlanner::plan_rows(const MoverItem& item, PlannedChunk& chunk) const {
  for (const BlockParts::SliceRows& rows : parts_->slice_rows(item.group)) {
    const BlockParts::Slice& first = rows.first;
    if (first.replicated && !item.with_replicated) continue;
    append_rows(chunk,
                {first.segment, device_offset(first, item), rows.device_pitch,
                 pool_offset(first, item), rows.part_pitch, first.size_bytes, rows.rows},
                limits_.pool_piece_bytes);
    chunk.size_bytes += rows.rows * first.size_bytes;
  }
}

void CopyPlanner::plan_staged(PlannedChunk& chunk) {
  const Place& first = order_[next_];
  chunk.group = GroupId{first.group};
  chunk.set = first.set;
  const std::uint64_t replicated =
      first.set == RegionSet::kAll ? parts_->replicated_bytes(chunk.group) : 0;
  const std::uint64_t sharded = parts_->sharded_bytes(chunk.group);
  for (; has_next(); ++next_) {
    const Place& place = order_[next_];
    const bool fits =
        chunk.items.empty() || (place.group == first.group && place.set == first.set &&
                                chunk.size_bytes + replicated + sharded <= limits_.slot_bytes);
    if (!fits) return;
    const MoverItem& item = items_[place.item];
    if (replicated > 0) {
      append_run(chunk.runs, {0, chunk.size_bytes, item.replicated_offset, replicated},
                 limits_.pool_piece_bytes);
    }
    if (sharded > 0) {
      append_run(chunk.runs, {0, chunk.size_bytes + replicated, item.shard_offset, sharded},
                 limits_.pool_piece_bytes);
    }
    chunk.items.push_back(place.item);
    chunk.blocks.push_back(item.block.value);
    chunk.size_bytes += replicated + sharded;
  }
}

}  // namespace kvferry::cache_manager
