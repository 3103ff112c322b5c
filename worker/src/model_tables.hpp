// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/kernels/reference_model.hpp"
#include "kvferry/worker/caching_allocator.hpp"

#include <cstdint>
#include <mutex>

namespace kvferry::worker {

/// The weights as the reference model computes with them: two tables in device memory, which stay
/// where they are for the worker's life. All zero until weights are packed into them.
/// @threading any. @lifetime device and allocator outlive it.
class ModelTables {
 public:
  static constexpr std::uint64_t kTableBytes = kernels::kModelWords * sizeof(std::uint64_t);

  ModelTables(ipc::Device& device, CachingAllocator& allocator)
      : device_(device), allocator_(allocator) {}
  ModelTables(const ModelTables&) = delete;
  ModelTables& operator=(const ModelTables&) = delete;

  /// Both, one behind the other; made by the first call. kNoDeviceMemory.
  [[nodiscard]] ipc::Result<ipc::DevicePtr> address(ipc::Deadline deadline);

 private:
  ipc::Device& device_;
  CachingAllocator& allocator_;
  std::mutex mutex_;  ///< Guards memory_, which is set once.
  ScratchBuffer memory_;
};

}  // namespace kvferry::worker
