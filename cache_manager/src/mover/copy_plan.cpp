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

// Runs of one size at one distance on either side become rows: of each block in a row of neighbours
// the same layers, which as copies of their own are too small for the link. None crosses a piece.
void join_into_rows(PlannedChunk& chunk, std::uint64_t pool_piece_bytes) {
  constexpr std::size_t kLeast = 4;
  std::vector<CopyRun>& runs = chunk.runs;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < runs.size();) {
    const CopyRun first = runs[i];
    const std::uint64_t bytes = first.size_bytes;
    CopyRows rows{first.segment, first.device_offset, 0, first.pool_offset, 0, bytes, 1};
    while (i + rows.rows < runs.size()) {
      const CopyRun& last = runs[i + rows.rows - 1];
      const CopyRun& next = runs[i + rows.rows];
      const bool is_alike =
          next.segment == first.segment && next.size_bytes == bytes &&
          next.device_offset >= last.device_offset + bytes &&
          next.pool_offset >= last.pool_offset + bytes &&
          next.pool_offset / pool_piece_bytes == first.pool_offset / pool_piece_bytes;
      if (!is_alike) break;
      if (rows.rows == 1) {
        rows.device_pitch = next.device_offset - last.device_offset;
        rows.pool_pitch = next.pool_offset - last.pool_offset;
      }
      if (next.device_offset - last.device_offset != rows.device_pitch ||
          next.pool_offset - last.pool_offset != rows.pool_pitch) {
        break;
      }
      ++rows.rows;
    }
    if (rows.rows >= kLeast) {
      chunk.rows.push_back(rows);
      i += rows.rows;
    } else {
      runs[kept++] = first;
      ++i;
    }
  }
  runs.resize(kept);
}

// Appends a part of the chunk's last block, joined to that of the one before where the pool allows.
void append_part(PlannedChunk& chunk, RegionSet set, std::uint64_t offset, std::uint64_t bytes) {
  const std::size_t block = chunk.blocks.size() - 1;
  // The last one of this kind is one of the last two.
  for (std::size_t back = 1; back <= std::min<std::size_t>(2, chunk.packed.size()); ++back) {
    PackedRun& run = chunk.packed[chunk.packed.size() - back];
    if (run.set != set) continue;
    if (run.first + run.count != block || run.pool_offset + run.count * bytes != offset) break;
    ++run.count;
    return;
  }
  chunk.packed.push_back({set, block, 1, offset, bytes});
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
      slice.layer = region.layer;
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
  packed.clear();
  blocks.clear();
  range = {};
  through = 0;
  last = false;
}

void CopyPlanner::start(const BlockParts& parts,
                        std::span<const MoverItem> items,
                        std::span<const std::uint8_t> results,
                        const PlanLimits& limits) {
  parts_ = &parts;
  items_ = items;
  limits_ = limits;
  order_.clear();
  step_ = 0;
  next_ = 0;
  progress_ = {};
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
  const bool by_group = limits.slot_bytes > 0 || limits.kernel;
  std::sort(order_.begin(), order_.end(), [by_group](const Place& a, const Place& b) {
    if (by_group && (a.group != b.group || a.set != b.set)) {
      return std::tie(a.group, a.set) < std::tie(b.group, b.set);
    }
    return std::tie(a.pool_offset, a.item) < std::tie(b.pool_offset, b.item);
  });
  plan_steps();
}

void CopyPlanner::plan_steps() {
  steps_.clear();
  if (!limits_.layered) {
    steps_.push_back({0, ipc::kMaxLayers});
    return;
  }
  layer_bytes_.clear();
  for (std::size_t i = 0; i < order_.size();) {
    const Place& place = order_[i];
    std::uint64_t alike = 0;
    for (; i < order_.size() && order_[i].group == place.group && order_[i].set == place.set; ++i) {
      ++alike;
    }
    for (const BlockParts::Slice& slice : parts_->slices(GroupId{place.group})) {
      if (slice.replicated && place.set == RegionSet::kSharded) continue;
      const auto at = std::lower_bound(
          layer_bytes_.begin(), layer_bytes_.end(), slice.layer,
          [](const auto& entry, std::uint32_t layer) { return entry.first < layer; });
      if (at != layer_bytes_.end() && at->first == slice.layer) {
        at->second += alike * slice.size_bytes;
      } else {
        layer_bytes_.insert(at, {slice.layer, alike * slice.size_bytes});
      }
    }
  }
  std::uint64_t bytes = 0;
  std::uint32_t first = 0;
  for (std::size_t i = 0; i < layer_bytes_.size(); ++i) {
    bytes += layer_bytes_[i].second;
    // The first one by itself: compute waits for it.
    const bool ends = i == 0 || bytes >= limits_.step_bytes || i + 1 == layer_bytes_.size();
    if (!ends) continue;
    const std::uint32_t end = layer_bytes_[i].first + 1;
    steps_.push_back({first, end});
    first = end;
    bytes = 0;
  }
}

void CopyPlanner::plan_next(PlannedChunk& chunk) {
  chunk.clear();
  if (limits_.slot_bytes > 0) {
    plan_staged(chunk);
  } else if (limits_.kernel) {
    plan_kernel(chunk);
  } else {
    plan_direct(chunk);
  }
  if (!limits_.layered) return;
  if (limits_.slot_bytes > 0) join_into_rows(chunk, limits_.pool_piece_bytes);
  const ipc::LayerRange& step = steps_[step_];
  const bool ends = next_ == order_.size();
  chunk.range = step;
  chunk.through = ends ? step.end : step.first;
  if (!ends) return;
  chunk.last = ++step_ == steps_.size();
  if (!chunk.last) next_ = 0;
}

void CopyPlanner::plan_direct(PlannedChunk& chunk) {
  while (has_next() && chunk.size_bytes < limits_.chunk_bytes &&
         chunk.runs.size() + chunk.rows.size() < limits_.chunk_runs) {
    const MoverItem& item = items_[order_[next_].item];
    if (!progress_.has_begun) progress_ = {true, goes_in_rows(item), 0, 0};
    chunk.items.push_back(order_[next_].item);
    if (!(progress_.in_rows ? plan_rows(item, chunk) : plan_slices(item, chunk))) return;
    progress_ = {};
    ++next_;
  }
}

bool CopyPlanner::is_cut(const MoverItem& item) const {
  const std::uint64_t bytes = parts_->sharded_bytes(item.group) +
                              (item.with_replicated ? parts_->replicated_bytes(item.group) : 0);
  return bytes > limits_.chunk_bytes;
}

// Rows are not cut themselves.
bool CopyPlanner::goes_in_rows(const MoverItem& item) const {
  if (!limits_.strided || limits_.layered) return false;
  const std::span<const BlockParts::SliceRows> all = parts_->slice_rows(item.group);
  return std::none_of(all.begin(), all.end(), [this](const BlockParts::SliceRows& rows) {
    return rows.first.size_bytes > limits_.chunk_bytes;
  });
}

void CopyPlanner::plan_kernel(PlannedChunk& chunk) {
  chunk.group = GroupId{order_[next_].group};
  const std::uint64_t replicated = parts_->replicated_bytes(chunk.group);
  const std::uint64_t sharded = parts_->sharded_bytes(chunk.group);
  for (; has_next() && order_[next_].group == chunk.group.value &&
         chunk.size_bytes < limits_.chunk_bytes && chunk.packed.size() < limits_.chunk_runs &&
         chunk.blocks.size() < limits_.chunk_blocks;
       ++next_) {
    const MoverItem& item = items_[order_[next_].item];
    chunk.items.push_back(order_[next_].item);
    chunk.blocks.push_back(item.block.value);
    if (item.with_replicated && replicated > 0) {
      append_part(chunk, RegionSet::kReplicated, item.replicated_offset, replicated);
      chunk.size_bytes += replicated;
    }
    if (sharded > 0) {
      append_part(chunk, RegionSet::kSharded, item.shard_offset, sharded);
      chunk.size_bytes += sharded;
    }
  }
}

// What is no larger than a chunk goes whole, whatever is in the chunk: it is one copy then.
bool CopyPlanner::plan_slices(const MoverItem& item, PlannedChunk& chunk) {
  const bool cut = is_cut(item);
  const std::span<const BlockParts::Slice> slices = parts_->slices(item.group);
  for (; progress_.whole < slices.size(); ++progress_.whole, progress_.part = 0) {
    const BlockParts::Slice& slice = slices[progress_.whole];
    if (slice.replicated && !item.with_replicated) continue;
    if (!steps_[step_].contains(slice.layer)) continue;
    if (cut && chunk.size_bytes >= limits_.chunk_bytes) return false;
    const std::uint64_t left = slice.size_bytes - progress_.part;
    const std::uint64_t size = cut ? std::min(left, limits_.chunk_bytes - chunk.size_bytes) : left;
    append_run(chunk.runs,
               {slice.segment, device_offset(slice, item) + progress_.part,
                pool_offset(slice, item) + progress_.part, size},
               limits_.pool_piece_bytes);
    chunk.size_bytes += size;
    if (size < left) {
      progress_.part += size;
      return false;
    }
  }
  return true;
}

bool CopyPlanner::plan_rows(const MoverItem& item, PlannedChunk& chunk) {
  const bool cut = is_cut(item);
  const std::span<const BlockParts::SliceRows> all = parts_->slice_rows(item.group);
  for (; progress_.whole < all.size(); ++progress_.whole, progress_.part = 0) {
    const BlockParts::SliceRows& rows = all[progress_.whole];
    const BlockParts::Slice& first = rows.first;
    if (first.replicated && !item.with_replicated) continue;
    if (cut && chunk.size_bytes >= limits_.chunk_bytes) return false;
    const std::uint64_t left = rows.rows - progress_.part;
    const std::uint64_t room =
        limits_.chunk_bytes - std::min(limits_.chunk_bytes, chunk.size_bytes);
    const std::uint64_t fit = std::max<std::uint64_t>(1, room / first.size_bytes);
    const std::uint64_t taken = cut ? std::min(left, fit) : left;
    append_rows(chunk,
                {first.segment, device_offset(first, item) + progress_.part * rows.device_pitch,
                 rows.device_pitch, pool_offset(first, item) + progress_.part * rows.part_pitch,
                 rows.part_pitch, first.size_bytes, taken},
                limits_.pool_piece_bytes);
    chunk.size_bytes += taken * first.size_bytes;
    if (taken < left) {
      progress_.part += taken;
      return false;
    }
  }
  return true;
}

void CopyPlanner::find_pieces(std::uint32_t group, RegionSet set) {
  pieces_.clear();
  pieces_bytes_ = 0;
  for (const BlockParts::Slice& slice : parts_->slices(GroupId{group})) {
    if (slice.replicated && set == RegionSet::kSharded) continue;
    if (!steps_[step_].contains(slice.layer)) continue;
    const bool continues =
        !pieces_.empty() && pieces_.back().replicated == slice.replicated &&
        pieces_.back().part_offset + pieces_.back().size_bytes == slice.part_offset;
    if (continues) {
      pieces_.back().size_bytes += slice.size_bytes;
    } else {
      pieces_.push_back({slice.replicated, slice.part_offset, pieces_bytes_, slice.size_bytes});
    }
    pieces_bytes_ += slice.size_bytes;
  }
}

void CopyPlanner::plan_staged(PlannedChunk& chunk) {
  const Place* first = nullptr;
  for (; next_ < order_.size(); ++next_) {
    const Place& place = order_[next_];
    if (first == nullptr) {
      find_pieces(place.group, place.set);
      chunk.group = GroupId{place.group};
      chunk.set = place.set;
      if (pieces_bytes_ == 0) continue;  // nothing of these layers
      first = &place;
    } else if (place.group != first->group || place.set != first->set ||
               chunk.size_bytes + pieces_bytes_ > limits_.slot_bytes ||
               chunk.blocks.size() == limits_.chunk_blocks) {
      return;
    }
    const MoverItem& item = items_[place.item];
    for (const Piece& piece : pieces_) {
      append_run(
          chunk.runs,
          {0, chunk.size_bytes + piece.packed_offset,
           (piece.replicated ? item.replicated_offset : item.shard_offset) + piece.part_offset,
           piece.size_bytes},
          limits_.pool_piece_bytes);
    }
    chunk.items.push_back(place.item);
    chunk.blocks.push_back(item.block.value);
    chunk.size_bytes += pieces_bytes_;
  }
}

}  // namespace kvferry::cache_manager
