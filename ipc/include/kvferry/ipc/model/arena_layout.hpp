// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/geometry.hpp"

#include <compare>
#include <cstdint>
#include <span>
#include <vector>

namespace kvferry::ipc {

/// One region inside an arena: segment index and byte offset instead of a pointer.
struct Region {
  RegionKind kind = RegionKind::kKey;
  std::uint32_t layer = 0;
  GroupId group;
  bool replicated = false;
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  std::uint64_t block_stride = 0;
  std::uint64_t block_bytes = 0;
  friend bool operator==(const Region&, const Region&) = default;
  template <typename V> void visit(V& v) {
    v(kind, layer, group, replicated, segment, offset, block_stride, block_bytes);
  }
};

struct GroupLayout {
  std::uint32_t block_count = 0;
  friend bool operator==(const GroupLayout&, const GroupLayout&) = default;
  template <typename V> void visit(V& v) { v(block_count); }
};

/// A ring of slots on the device, in the arena, for cooperative staging.
struct StagingRing {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  std::uint64_t slot_bytes = 0;
  std::uint32_t slots = 0;  ///< 0: no staging.
  friend bool operator==(const StagingRing&, const StagingRing&) = default;
  template <typename V> void visit(V& v) { v(segment, offset, slot_bytes, slots); }
};

/// A run of bytes in one segment.
struct ByteRange {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
  std::uint64_t size_bytes = 0;
  friend auto operator<=>(const ByteRange&, const ByteRange&) = default;
};

/// Everything an attacher needs to address an arena, without pointers. Sent with every grant.
struct ArenaLayout {
  ArenaOrder order = ArenaOrder::kLayerFirst;
  std::vector<std::uint64_t> segment_bytes;  ///< One per allocation.
  std::vector<Region> regions;               ///< In geometry order: group by group.
  std::vector<GroupLayout> groups;
  StagingRing staging;
  Digest fingerprint;  ///< Geometry::fingerprint(order).
  friend bool operator==(const ArenaLayout&, const ArenaLayout&) = default;
  template <typename V> void visit(V& v) {
    v(order, segment_bytes, regions, groups, staging, fingerprint);
  }

  /// Holds every region and the ring to the segment sizes and the geometry (untrusted input):
  /// counts, overflow, stride >= bytes, region bytes as the geometry says, fingerprint. No two
  /// regions share a byte; regions may only be interleaved inside one common block stride. In
  /// kBlockFirst, every block of a group is one run that equals its packed form.
  [[nodiscard]] Status validate(const Geometry& geometry) const;
  /// Bytes of all segments.
  [[nodiscard]] std::uint64_t total_bytes() const;
  /// The bytes that regions and ring cover, and no other, in order and as few ranges as that takes:
  /// a segment may hold other things of an engine, too. @pre validated.
  [[nodiscard]] std::vector<ByteRange> covered_ranges() const;
};

struct ArenaOptions {
  ArenaOrder order = ArenaOrder::kLayerFirst;
  std::uint32_t gpu_blocks = 0;          ///< Of a group with blocks_percent = 100.
  std::uint64_t staging_slot_bytes = 0;  ///< 0: no staging ring.
  std::uint32_t staging_slots = 0;
};

/// Bases of regions (kBlockFirst: of groups), the ring and its slots are aligned to it.
inline constexpr std::uint64_t kArenaAlignment = 256;
inline constexpr std::uint32_t kMaxDeviceBlocks = 1U << 30;  ///< Of one group.
inline constexpr std::uint64_t kMaxArenaBytes = 1ULL << 48;  ///< Of all segments together.
inline constexpr std::uint32_t kMaxStagingSlots = 4096;

/// Pure: the layout for one rank. A group gets gpu_blocks * blocks_percent / 100 blocks, rounded
/// down. Block strides are exact: neighbouring blocks of a region (kBlockFirst: whole blocks)
/// touch. The ring comes last (kLayerFirstMany: in its own segment), its slots rounded up to
/// kArenaAlignment. Errors name the size that is zero or overflows.
[[nodiscard]] Result<ArenaLayout> plan_arena(const Geometry& geometry, const ArenaOptions& options);

/// Where the bytes of one group's block lie on the host: the replicated part once, then each rank's
/// shard. Parts are kept in separate runs of a slab, so each rank's share is one range.
struct HostBlockShape {
  std::uint64_t replicated_bytes = 0;
  std::uint64_t shard_bytes = 0;
};
[[nodiscard]] HostBlockShape host_block_shape(const Geometry& geometry, GroupId group);

}  // namespace kvferry::ipc
