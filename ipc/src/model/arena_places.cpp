// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "model/arena_places.hpp"

#include "model/packed_order.hpp"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

namespace kvferry::ipc {
namespace {

/// One region or the ring, as bytes of a segment.
struct Extent {
  std::uint32_t segment = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;  ///< Of the last block's slice.
  std::uint64_t stride = 0;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;
  std::string name;
};

Status check_segments(const ArenaLayout& layout) {
  // At most one segment per region and one for the ring.
  if (layout.segment_bytes.empty() || layout.segment_bytes.size() > layout.regions.size() + 1) {
    return KVFERRY_ERROR(kProtocol, "arena layout: {} segments for {} regions",
                         layout.segment_bytes.size(), layout.regions.size());
  }
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < layout.segment_bytes.size(); ++i) {
    const std::uint64_t bytes = layout.segment_bytes[i];
    if (bytes == 0 || bytes > kMaxArenaBytes - sum) {
      return KVFERRY_ERROR(kProtocol,
                           "arena layout: segment {} has {} bytes after {}, expected 1 byte or "
                           "more, and {} in all at most",
                           i, bytes, sum, kMaxArenaBytes);
    }
    sum += bytes;
  }
  return ok();
}

/// Checks that the extent lies in its segment, and computes its end.
Status bound(const ArenaLayout& layout, Extent& extent) {
  if (extent.segment >= layout.segment_bytes.size()) {
    return KVFERRY_ERROR(kProtocol, "arena layout: {} names segment {} of {}", extent.name,
                         extent.segment, layout.segment_bytes.size());
  }
  if (extent.count == 0 || extent.bytes == 0 || extent.stride < extent.bytes) {
    return KVFERRY_ERROR(kProtocol, "arena layout: {} has {} blocks of {} bytes, {} bytes apart",
                         extent.name, extent.count, extent.bytes, extent.stride);
  }
  const std::uint64_t limit = layout.segment_bytes[extent.segment];
  if (__builtin_mul_overflow(extent.count - 1, extent.stride, &extent.end) ||
      __builtin_add_overflow(extent.end, extent.bytes, &extent.end) ||
      __builtin_add_overflow(extent.end, extent.begin, &extent.end) || extent.end > limit) {
    return KVFERRY_ERROR(
        kProtocol,
        "arena layout: {} at offset {} with {} blocks of {} bytes, {} bytes apart, "
        "leaves segment {} of {} bytes",
        extent.name, extent.begin, extent.count, extent.bytes, extent.stride, extent.segment,
        limit);
  }
  return ok();
}

Status overlap(const Extent& a, const Extent& b) {
  return KVFERRY_ERROR(kProtocol,
                       "arena layout: {} at offset {} overlaps {} at offset {} of segment {}",
                       b.name, b.begin, a.name, a.begin, a.segment);
}

/// Extents that touch each other are only sound when they are slices of one common block: same
/// stride and count, side by side inside the stride.
Status check_interleaved(std::span<const Extent> cluster) {
  const Extent& first = cluster.front();
  for (std::size_t i = 1; i < cluster.size(); ++i) {
    const Extent& before = cluster[i - 1];
    const Extent& here = cluster[i];
    if (here.stride != first.stride || here.count != first.count) return overlap(before, here);
    if (before.begin + before.bytes > here.begin) return overlap(before, here);
    if (here.begin + here.bytes > first.begin + first.stride) return overlap(first, here);
  }
  return ok();
}

Status check_disjoint(std::vector<Extent> extents) {
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) {
    return a.segment != b.segment ? a.segment < b.segment : a.begin < b.begin;
  });
  for (std::size_t begin = 0; begin < extents.size();) {
    std::uint64_t reach = extents[begin].end;
    std::size_t end = begin + 1;
    while (end < extents.size() && extents[end].segment == extents[begin].segment &&
           extents[end].begin < reach) {
      reach = std::max(reach, extents[end].end);
      ++end;
    }
    KVFERRY_TRY(check_interleaved(std::span(extents).subspan(begin, end - begin)));
    begin = end;
  }
  return ok();
}

/// Block-first promises its readers that a block is one run equal to its packed form.
Status check_one_run(std::span<const Region> regions, std::uint32_t group) {
  const std::vector<std::size_t> order = model::packed_order(regions);
  const Region& first = regions[order.front()];
  std::uint64_t expected = first.offset;
  for (const std::size_t i : order) {
    const Region& region = regions[i];
    if (region.segment != first.segment || region.block_stride != first.block_stride ||
        region.offset != expected) {
      return KVFERRY_ERROR(kProtocol,
                           "arena layout: block-first group {}: region {} lies at segment {}, "
                           "offset {}, stride {}; expected segment {}, offset {}, stride {}",
                           group, i, region.segment, region.offset, region.block_stride,
                           first.segment, expected, first.block_stride);
    }
    expected += region.block_bytes;
  }
  return ok();
}

/// One group, whose regions are `own` and start at place `first` of the layout; appends their
/// extents.
Status check_group(const ArenaLayout& layout,
                   std::span<const Region> own,
                   std::uint32_t index,
                   std::size_t first,
                   std::vector<Extent>& extents) {
  const std::uint32_t count = layout.groups[index].block_count;
  if (count == 0 || count > kMaxDeviceBlocks) {
    return KVFERRY_ERROR(kProtocol, "arena layout: group {} has {} blocks, expected 1 to {}", index,
                         count, kMaxDeviceBlocks);
  }
  for (std::size_t i = 0; i < own.size(); ++i) {
    std::string name = fmt::format("region {} ({} of layer {} in group {})", first + i,
                                   to_string(own[i].kind), own[i].layer, index);
    extents.push_back(Extent{own[i].segment, own[i].offset, 0, own[i].block_stride,
                             own[i].block_bytes, count, std::move(name)});
    KVFERRY_TRY(bound(layout, extents.back()));
  }
  return layout.order == ArenaOrder::kBlockFirst && !own.empty() ? check_one_run(own, index) : ok();
}

Status check_staging(const ArenaLayout& layout, std::vector<Extent>& extents) {
  const StagingRing& ring = layout.staging;
  if (ring == StagingRing{}) return ok();
  if (ring.slots == 0 || ring.slots > kMaxStagingSlots) {
    return KVFERRY_ERROR(kProtocol,
                         "arena layout: staging ring at segment {}, offset {} has {} slots of {} "
                         "bytes, expected 1 to {} slots, or all zero",
                         ring.segment, ring.offset, ring.slots, ring.slot_bytes, kMaxStagingSlots);
  }
  extents.push_back(Extent{ring.segment, ring.offset, 0, ring.slot_bytes, ring.slot_bytes,
                           ring.slots, "staging ring"});
  return bound(layout, extents.back());
}

}  // namespace

Status model::check_places(const ArenaLayout& layout) {
  KVFERRY_TRY(check_segments(layout));
  std::vector<Extent> extents;
  extents.reserve(layout.regions.size() + 1);
  std::size_t first = 0;
  for (std::uint32_t g = 0; g < layout.groups.size(); ++g) {
    std::size_t end = first;
    while (end < layout.regions.size() && layout.regions[end].group == GroupId{g}) ++end;
    KVFERRY_TRY(check_group(layout, std::span(layout.regions).subspan(first, end - first), g, first,
                            extents));
    first = end;
  }
  if (first != layout.regions.size()) {
    return KVFERRY_ERROR(kProtocol, "arena layout: region {} names group {} of {}, out of order",
                         first, layout.regions[first].group.value, layout.groups.size());
  }
  KVFERRY_TRY(check_staging(layout, extents));
  return check_disjoint(std::move(extents));
}

}  // namespace kvferry::ipc
