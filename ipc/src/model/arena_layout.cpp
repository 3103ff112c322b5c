// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/arena_layout.hpp"

#include "model/packed_order.hpp"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::uint64_t align_up(std::uint64_t value) noexcept {
  return (value + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

Status check_options(const Geometry& geometry, const ArenaOptions& options) {
  if (to_string(options.order) == "invalid") {
    return KVFERRY_ERROR(kInvalidArgument, "arena order {} is none of 1 to {}",
                         static_cast<int>(options.order),
                         static_cast<int>(ArenaOrder::kBlockFirst));
  }
  if (options.gpu_blocks == 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "arena of geometry '{}': gpu_blocks is 0; give at least 1", geometry.name);
  }
  if (options.staging_slot_bytes == 0) return ok();
  if (options.staging_slots == 0 || options.staging_slots > kMaxStagingSlots) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "staging ring with slots of {} bytes has {} slots, expected 1 to {}",
                         options.staging_slot_bytes, options.staging_slots, kMaxStagingSlots);
  }
  if (options.staging_slot_bytes > kMaxArenaBytes) {
    return KVFERRY_ERROR(kInvalidArgument, "staging slot of {} bytes is larger than {} bytes",
                         options.staging_slot_bytes, kMaxArenaBytes);
  }
  std::uint64_t smallest = std::numeric_limits<std::uint64_t>::max();
  for (std::uint32_t i = 0; i < geometry.groups.size(); ++i) {
    smallest = std::min(smallest,
                        geometry.replicated_bytes(GroupId{i}) + geometry.sharded_bytes(GroupId{i}));
  }
  if (options.staging_slot_bytes < smallest) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "staging slot of {} bytes holds no block of geometry '{}', the smallest "
                         "has {} bytes; raise the slot size, or set it to 0 for no staging",
                         options.staging_slot_bytes, geometry.name, smallest);
  }
  return ok();
}

Result<std::uint32_t> group_blocks(const GroupSpec& group, std::uint32_t gpu_blocks) {
  const std::uint64_t count = std::uint64_t{gpu_blocks} * group.blocks_percent / 100;
  if (count == 0 || count > kMaxDeviceBlocks) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "group '{}' gets {} % of {} gpu_blocks = {} blocks, expected 1 to {}; "
                         "change gpu_blocks",
                         group.name, group.blocks_percent, gpu_blocks, count, kMaxDeviceBlocks);
  }
  return static_cast<std::uint32_t>(count);
}

/// Lays ranges one after the other into segments and keeps the sum in bounds.
class Planner {
 public:
  explicit Planner(ArenaLayout& layout) : layout_(layout) {}

  void new_segment() { layout_.segment_bytes.push_back(0); }
  [[nodiscard]] std::uint32_t segment() const {
    return static_cast<std::uint32_t>(layout_.segment_bytes.size() - 1);
  }

  /// Offset of the next `count` blocks of `stride` bytes in the current segment.
  Result<std::uint64_t> place(std::string_view what, std::uint64_t count, std::uint64_t stride) {
    std::uint64_t& end = layout_.segment_bytes.back();
    const std::uint64_t offset = align_up(end);
    std::uint64_t size = 0;
    // All terms but the product are at most kMaxArenaBytes (+ alignment), so only it can overflow.
    if (__builtin_mul_overflow(count, stride, &size) || size > kMaxArenaBytes ||
        total_ + (offset - end) + size > kMaxArenaBytes) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "arena: {} with {} x {} bytes after {} bytes exceeds the largest arena "
                           "of {} bytes; lower gpu_blocks",
                           what, count, stride, total_, kMaxArenaBytes);
    }
    total_ += (offset - end) + size;
    end = offset + size;
    return offset;
  }

 private:
  ArenaLayout& layout_;
  std::uint64_t total_ = 0;
};

Region make_region(const RegionSpec& spec, std::uint32_t group) {
  Region region;
  region.kind = spec.kind;
  region.layer = spec.layer;
  region.group = GroupId{group};
  region.replicated = spec.replicated;
  region.block_bytes = spec.block_bytes;
  return region;
}

Status place_layer_first(const GroupSpec& group,
                         std::uint32_t index,
                         ArenaLayout& layout,
                         Planner& planner) {
  for (const RegionSpec& spec : group.regions) {
    Region region = make_region(spec, index);
    if (layout.order == ArenaOrder::kLayerFirstMany) planner.new_segment();
    region.segment = planner.segment();
    region.block_stride = spec.block_bytes;
    KVFERRY_ASSIGN(region.offset,
                   planner.place(fmt::format("{} of layer {} in group '{}'", to_string(spec.kind),
                                             spec.layer, group.name),
                                 layout.groups[index].block_count, region.block_stride));
    layout.regions.push_back(region);
  }
  return ok();
}

Status place_block_first(const GroupSpec& group,
                         std::uint32_t index,
                         ArenaLayout& layout,
                         Planner& planner) {
  std::uint64_t stride = 0;
  for (const RegionSpec& spec : group.regions) stride += spec.block_bytes;
  KVFERRY_ASSIGN(std::uint64_t offset, planner.place(fmt::format("group '{}'", group.name),
                                                     layout.groups[index].block_count, stride));
  const std::size_t first = layout.regions.size();
  for (const RegionSpec& spec : group.regions) {
    Region region = make_region(spec, index);
    region.segment = planner.segment();
    region.block_stride = stride;
    layout.regions.push_back(region);
  }
  for (const std::size_t i : model::packed_order<RegionSpec>(group.regions)) {
    layout.regions[first + i].offset = offset;
    offset += group.regions[i].block_bytes;
  }
  return ok();
}

Status place_groups(const Geometry& geometry,
                    std::uint32_t gpu_blocks,
                    ArenaLayout& layout,
                    Planner& planner) {
  for (std::uint32_t i = 0; i < geometry.groups.size(); ++i) {
    const GroupSpec& group = geometry.groups[i];
    KVFERRY_ASSIGN(const std::uint32_t count, group_blocks(group, gpu_blocks));
    layout.groups.push_back(GroupLayout{count});
    KVFERRY_TRY(layout.order == ArenaOrder::kBlockFirst
                    ? place_block_first(group, i, layout, planner)
                    : place_layer_first(group, i, layout, planner));
  }
  return ok();
}

Status place_staging(const ArenaOptions& options, ArenaLayout& layout, Planner& planner) {
  if (layout.order == ArenaOrder::kLayerFirstMany) planner.new_segment();
  StagingRing& ring = layout.staging;
  ring.segment = planner.segment();
  ring.slots = options.staging_slots;
  ring.slot_bytes = align_up(options.staging_slot_bytes);
  KVFERRY_ASSIGN(ring.offset, planner.place("staging ring", ring.slots, ring.slot_bytes));
  return ok();
}

/// Equal slices at equal distances.
struct Slices {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t stride = 0;
  std::uint64_t count = 0;
  friend auto operator<=>(const Slices&, const Slices&) = default;
};

/// Slices of one common block that lie side by side become one. @pre sorted.
void join_neighbours(std::vector<Slices>& all) {
  std::vector<Slices> joined;
  for (const Slices& slices : all) {
    Slices* last = joined.empty() ? nullptr : &joined.back();
    if (last != nullptr && last->segment == slices.segment &&
        last->offset + last->bytes == slices.offset && last->stride == slices.stride &&
        last->count == slices.count && last->bytes + slices.bytes <= slices.stride) {
      last->bytes += slices.bytes;
    } else {
      joined.push_back(slices);
    }
  }
  all = std::move(joined);
}

bool ends_at(const ByteRange& range, const ByteRange& next) noexcept {
  return range.segment == next.segment && range.offset + range.size_bytes == next.offset;
}

}  // namespace

std::uint64_t ArenaLayout::total_bytes() const {
  std::uint64_t sum = 0;
  for (const std::uint64_t bytes : segment_bytes) sum += bytes;
  return sum;
}

std::vector<ByteRange> ArenaLayout::covered_ranges() const {
  std::vector<Slices> all;
  for (const Region& region : regions) {
    all.push_back({region.segment, region.offset, region.block_bytes, region.block_stride,
                   groups[region.group.value].block_count});
  }
  if (staging.slots > 0) {
    all.push_back(
        {staging.segment, staging.offset, staging.slot_bytes, staging.slot_bytes, staging.slots});
  }
  std::sort(all.begin(), all.end());
  join_neighbours(all);
  std::vector<ByteRange> ranges;
  for (const Slices& slices : all) {
    const bool one_run = slices.bytes == slices.stride;
    const std::uint64_t count = one_run ? 1 : slices.count;
    const std::uint64_t bytes = one_run ? slices.count * slices.bytes : slices.bytes;
    for (std::uint64_t i = 0; i < count; ++i) {
      const ByteRange range{slices.segment, slices.offset + i * slices.stride, bytes};
      if (!ranges.empty() && ends_at(ranges.back(), range)) {
        ranges.back().size_bytes += range.size_bytes;
      } else {
        ranges.push_back(range);
      }
    }
  }
  return ranges;
}

Result<ArenaLayout> plan_arena(const Geometry& geometry, const ArenaOptions& options) {
  KVFERRY_TRY(geometry.validate());
  KVFERRY_TRY(check_options(geometry, options));
  ArenaLayout layout;
  layout.order = options.order;
  layout.fingerprint = geometry.fingerprint(options.order);
  Planner planner(layout);
  if (options.order != ArenaOrder::kLayerFirstMany) planner.new_segment();
  KVFERRY_TRY(place_groups(geometry, options.gpu_blocks, layout, planner));
  if (options.staging_slot_bytes != 0) KVFERRY_TRY(place_staging(options, layout, planner));
  return layout;
}

HostBlockShape host_block_shape(const Geometry& geometry, GroupId group) {
  return HostBlockShape{geometry.replicated_bytes(group), geometry.sharded_bytes(group)};
}

}  // namespace kvferry::ipc
