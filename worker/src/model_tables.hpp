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
/// where they are until they are released. All zero until weights are packed into them.
/// @threading any. @lifetime device and allocator outlive it.
class ModelTables {
 public:
  static constexpr std::uint64_t kTableBytes = kernels::kModelWords * sizeof(std::uint64_t);

  ModelTables(ipc::Device& device, CachingAllocator& allocator)
      : device_(device), allocator_(allocator) {}
  ModelTables(const ModelTables&) = delete;
  ModelTables& operator=(const ModelTables&) = delete;

  /// Both, one behind the other, to compute with. kNotReady while they hold no weights: released,
  /// or resumed without a backup.
  [[nodiscard]] ipc::Result<ipc::DevicePtr> address(ipc::Deadline deadline);
  /// To write weights into; made by the first call. kNoDeviceMemory.
  [[nodiscard]] ipc::Result<ipc::DevicePtr> memory(ipc::Deadline deadline);
  /// Gives the memory up, so that nothing computes until it holds weights again.
  /// @pre no work on them is under way
  void release();
  void set_holds_weights();

 private:
  ipc::Device& device_;
  CachingAllocator& allocator_;
  [[nodiscard]] ipc::Result<ipc::DevicePtr> make(ipc::Deadline deadline);

  std::mutex mutex_;  ///< Guards what follows.
  ScratchBuffer memory_;
  bool lost_ = false;  ///< They hold no weights.
};

}  // namespace kvferry::worker
