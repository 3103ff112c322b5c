// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"

#include <cstdint>
#include <vector>

namespace kvferry::ipc {

/// Bases of regions that an ArenaSource gives are aligned to it; what tensors of frameworks are.
inline constexpr std::uint64_t kRegionAlignment = 16;

/// One region that the geometry asks for.
struct RegionRequest {
  RegionKind kind = RegionKind::kKey;
  std::uint32_t layer = 0;
  GroupId group;
  bool replicated = false;
  std::uint64_t block_bytes = 0;
  std::uint32_t block_count = 0;
};

/// What an ArenaSource is asked for: the memory of one epoch.
struct ArenaRequest {
  Epoch epoch;
  /// kBlockFirst: all regions of a group lie in one allocation with one stride, and each block is
  /// one run: its replicated regions first, then the others, in the order of `regions`.
  ArenaOrder order = ArenaOrder::kLayerFirst;
  std::vector<RegionRequest> regions;  ///< In geometry order: group by group.
};

/// Where one region lies: block b is [base + b * block_stride, + block_bytes).
struct RegionMemory {
  DevicePtr base;                 ///< May lie inside an allocation that holds other things, too.
  std::uint64_t size_bytes = 0;   ///< From base on; the last block must end inside.
  std::uint64_t block_bytes = 0;  ///< Of one block, as its owner counts; held to the geometry.
  std::uint64_t block_stride = 0;
};

/// The memory of a serving engine that allocates its KV tensors by itself. kvferry borrows the
/// allocations behind them for an epoch, exports them, and hands them back through release().
///
/// Life of an epoch: one allocate(); then, if that succeeded, exactly one release(), whatever
/// happened in between: also when the regions were refused or the epoch never became ready. The
/// call comes only after every peer has let go (or was proven dead, with no child of it left that
/// maps the memory) and this process's own work has ended. While a peer that stalls still maps the
/// memory, release() is not called, with either kind of handles: the epoch is in quarantine, its
/// tensors must stay, and release() follows when the peer has let go. Several epochs can be waiting
/// like that. An owner that ends with an epoch in quarantine does not release it: its memory must
/// then stay untouched until the process ends.
/// @threading called on the lease thread, one call at a time. A call that does not return holds up
/// grants and clears of this rank, whose callers get kTimeout.
/// @lifetime outlives the lease.
class ArenaSource {
 public:
  virtual ~ArenaSource() = default;

  /// One RegionMemory for each requested region, in that order. Regions share no byte, and nothing
  /// but kvferry's jobs and the engine's own steps writes them. The blocks are zeroed afterwards,
  /// and nothing around them. An epoch that failed before it was ready is asked for again. An error
  /// (or an exception) means that nothing stays allocated.
  [[nodiscard]] virtual Result<std::vector<RegionMemory>> allocate(const ArenaRequest& request) = 0;

  /// Give the epoch's memory back to the driver: drop its tensors, empty the caching allocator.
  /// Afterwards kvferry looks by itself whether the allocations are gone. Those that are not, or
  /// whose release failed (error or exception), are quarantined by name until they are. It is not
  /// called again.
  [[nodiscard]] virtual Status release(Epoch epoch) = 0;
};

}  // namespace kvferry::ipc
