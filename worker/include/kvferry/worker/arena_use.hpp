// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "kvferry/ipc/model/layer_ticket.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvferry::worker {

/// Pointers and sizes of one group in the mapped arena.
struct GroupView {
  std::uint32_t block_count = 0;
  /// By RegionSet; null where the group has no such region.
  std::array<std::unique_ptr<ipc::RegionTable>, 3> tables;
  std::array<std::uint64_t, 3> packed_bytes{};
  std::array<std::vector<std::uint32_t>, 3> layers;  ///< Of each table's regions.

  [[nodiscard]] const ipc::RegionTable* table(ipc::RegionSet set) const noexcept {
    return tables[index(set)].get();
  }
  [[nodiscard]] std::uint64_t packed(ipc::RegionSet set) const noexcept {
    return packed_bytes[index(set)];
  }
  /// The set's regions of some layers, as a packed block has them that holds nothing else.
  [[nodiscard]] std::vector<kernels::StridedRegion> regions(ipc::RegionSet set,
                                                            const ipc::LayerRange& range) const;
  [[nodiscard]] std::uint64_t packed(ipc::RegionSet set, const ipc::LayerRange& range) const;
  [[nodiscard]] static std::size_t index(ipc::RegionSet set) noexcept {
    return static_cast<std::size_t>(set) - 1;
  }
};

/// What a worker's compute and the staging agent may use of one mapped epoch.
struct MappedArena {
  ipc::SessionId session;
  ipc::Epoch epoch;
  std::vector<GroupView> groups;
  std::uint64_t slot_bytes = 0;
  std::vector<ipc::DevicePtr> slots;

  /// Layers are numbered from 0 to one below it.
  [[nodiscard]] std::uint32_t layer_count() const noexcept;
};

class WorkerArena;

/// Permission to use the arena: while one exists, a clear waits (at most its drain time) and
/// nothing is unmapped. Held from before the first launch until the work was observed complete.
/// @threading any. @lifetime the RegisteredWorker outlives it.
class ArenaUse {
 public:
  ArenaUse() = default;
  ArenaUse(ArenaUse&& other) noexcept
      : owner_(std::exchange(other.owner_, nullptr)),
        arena_(std::exchange(other.arena_, nullptr)) {}
  ArenaUse& operator=(ArenaUse&& other) noexcept {
    ArenaUse taken(std::move(other));
    std::swap(owner_, taken.owner_);
    std::swap(arena_, taken.arena_);
    return *this;
  }
  ArenaUse(const ArenaUse&) = delete;
  ArenaUse& operator=(const ArenaUse&) = delete;
  ~ArenaUse();

  [[nodiscard]] const MappedArena& arena() const noexcept { return *arena_; }

 private:
  friend class WorkerArena;
  ArenaUse(WorkerArena* owner, const MappedArena* arena) : owner_(owner), arena_(arena) {}
  WorkerArena* owner_ = nullptr;
  const MappedArena* arena_ = nullptr;
};

static_assert(std::is_nothrow_move_constructible_v<ArenaUse>);

}  // namespace kvferry::worker
