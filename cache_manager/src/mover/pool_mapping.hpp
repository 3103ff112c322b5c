// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace kvferry::cache_manager {

/// One manager's host pool in a mover: mapped whole, registered with the device piece by piece when
/// a copy first touches a piece, so that serving starts at once and nothing is pinned for long.
/// @threading any. @lifetime device outlives it; unregisters and unmaps in the destructor.
class PoolMapping {
 public:
  /// A copy never crosses a multiple of this.
  static constexpr std::uint64_t kPieceBytes = 64ULL << 20;

  [[nodiscard]] static ipc::Result<std::shared_ptr<PoolMapping>> map(ipc::Device& device,
                                                                     ipc::UniqueFd fd,
                                                                     std::uint64_t size_bytes);
  PoolMapping(const PoolMapping&) = delete;
  PoolMapping& operator=(const PoolMapping&) = delete;
  ~PoolMapping();

  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return size_bytes_; }
  /// The address of a range inside one piece, which is registered from now on.
  [[nodiscard]] ipc::Result<void*> pinned(std::uint64_t offset, std::uint64_t size_bytes);

 private:
  PoolMapping(ipc::Device& device, ipc::SharedMapping mapping, std::uint64_t size_bytes);

  ipc::Device& device_;
  ipc::SharedMapping mapping_;
  std::uint64_t size_bytes_;
  std::mutex mutex_;  // guards registered_
  std::vector<bool> registered_;
};

}  // namespace kvferry::cache_manager
