// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "mover/copy_plan.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace kvferry::cache_manager {

/// A small arena, host memory for its blocks, and copies between them as a lane makes them: by the
/// same plans. Nothing in it is anybody's. What it has of the device is taken last and given back
/// first: whoever waits for that does not wait for 64 MiB of host memory to be touched, pinned and
/// unpinned. @threading one thread.
class MeasureBed {
 public:
  static constexpr std::uint64_t kMostBytes = 64ULL << 20;  ///< On the device, and on the host.

  /// Without what it has of the device.
  [[nodiscard]] static ipc::Result<std::unique_ptr<MeasureBed>> make(ipc::Device& device,
                                                                     const ipc::Geometry& geometry,
                                                                     ipc::ArenaOrder order);
  MeasureBed(const MeasureBed&) = delete;
  MeasureBed& operator=(const MeasureBed&) = delete;
  ~MeasureBed();

  /// Before anything is enqueued.
  [[nodiscard]] ipc::Status take_device();
  void give_device_back();

  /// Blocks that each group has.
  [[nodiscard]] std::uint32_t blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::uint64_t block_bytes(ipc::GroupId group) const {
    return parts_.replicated_bytes(group) + parts_.sharded_bytes(group);
  }
  [[nodiscard]] std::uint32_t regions(ipc::GroupId group) const {
    return static_cast<std::uint32_t>(parts_.slices(group).size());
  }

  /// Seconds from the first call until the device has done all that `enqueue` gave to it.
  [[nodiscard]] ipc::Result<double> time(const std::function<ipc::Status()>& enqueue);
  /// One job with the first blocks of a group, which lie at random in the arena and together on the
  /// host. @pre count <= blocks().
  [[nodiscard]] ipc::Status enqueue_job(CopyStrategy strategy,
                                        ipc::CopyDirection direction,
                                        ipc::GroupId group,
                                        std::uint32_t count);
  /// One copy in one piece. @pre size_bytes <= kMostBytes, and no more than all blocks of a group.
  [[nodiscard]] ipc::Status enqueue_large(ipc::CopyDirection direction, std::uint64_t size_bytes);

 private:
  MeasureBed(ipc::Device& device, ipc::ArenaLayout layout, std::uint32_t blocks);
  [[nodiscard]] ipc::Status set_up_host();
  [[nodiscard]] ipc::Status enqueue_chunk(CopyStrategy strategy, ipc::CopyDirection direction);

  ipc::Device& device_;
  const ipc::ArenaLayout layout_;
  const BlockParts parts_;
  const std::uint32_t blocks_;
  std::vector<std::vector<ipc::MoverItem>> items_;  ///< Of each group.
  std::vector<std::uint8_t> results_;
  std::unique_ptr<ipc::DeviceMemory> memory_;
  std::vector<ipc::DevicePtr> segments_;
  std::vector<std::byte> host_memory_;
  std::byte* host_ = nullptr;  ///< Where a page of it begins; registered.
  ipc::EventFd ended_;
  std::unique_ptr<ipc::Stream> stream_;  // after what its work uses
  CopyPlanner planner_;
  PlannedChunk chunk_;
  std::vector<ipc::CopyOp> ops_;
  std::vector<ipc::RowCopyOp> row_ops_;
};

}  // namespace kvferry::cache_manager
