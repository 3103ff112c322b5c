// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/arena_blocks.hpp"

#include "must.hpp"

#include <utility>

namespace kvferry::cli {

ArenaBlocks::ArenaBlocks(ipc::Device& device,
                         const ipc::ArenaLayout& layout,
                         ipc::HandleKind handles) {
  for (const std::uint64_t size_bytes : layout.segment_bytes) {
    segments_.push_back(must(device.allocate(size_bytes, handles, nullptr)));
  }
  for (const ipc::GroupLayout& group : layout.groups) {
    groups_.emplace_back().block_count = group.block_count;
  }
  for (const ipc::Region& region : layout.regions) {
    Group& group = groups_.at(region.group.value);
    group.slices.push_back({segments_.at(region.segment)->address() + region.offset,
                            region.block_stride, region.block_bytes, group.packed_bytes});
    group.packed_bytes += region.block_bytes;
  }
  for (Group& group : groups_) {
    std::vector<kernels::StridedRegion> regions;
    for (const Slice& slice : group.slices) {
      regions.push_back({static_cast<unsigned char*>(slice.base.raw()), slice.block_stride,
                         slice.size_bytes, slice.packed_offset, 0});
    }
    group.rows = rows_of(group.slices);
    group.table = must(device.make_region_table(std::move(regions)));
  }
}

std::vector<ArenaBlocks::Rows> ArenaBlocks::rows_of(const std::vector<Slice>& slices) {
  std::vector<Rows> all;
  for (const Slice& slice : slices) {
    if (!all.empty()) {
      Rows& last = all.back();
      const std::uint64_t reached = last.first.base.address + (last.count - 1) * last.distance;
      const std::uint64_t distance = slice.base.address - reached;
      if (slice.size_bytes == last.first.size_bytes &&
          slice.block_stride == last.first.block_stride && slice.base.address > reached &&
          distance >= slice.size_bytes && (last.count == 1 || distance == last.distance)) {
        last.distance = distance;
        ++last.count;
        continue;
      }
    }
    all.push_back({slice, 0, 1});
  }
  return all;
}

void ArenaBlocks::add_slices(ipc::GroupId group,
                             std::uint32_t block,
                             std::byte* host,
                             std::vector<ipc::CopyOp>& ops) const {
  for (const Slice& slice : groups_.at(group.value).slices) {
    ops.push_back(
        {host + slice.packed_offset, slice.base + block * slice.block_stride, slice.size_bytes});
  }
}

void ArenaBlocks::add_rows(ipc::GroupId group,
                           std::uint32_t block,
                           std::byte* host,
                           std::vector<ipc::RowCopyOp>& ops) const {
  for (const Rows& rows : groups_.at(group.value).rows) {
    const Slice& first = rows.first;
    ops.push_back({host + first.packed_offset, first.size_bytes,
                   first.base + block * first.block_stride, rows.distance, first.size_bytes,
                   rows.count});
  }
}

}  // namespace kvferry::cli
