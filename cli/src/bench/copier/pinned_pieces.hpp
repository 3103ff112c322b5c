// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"

#include <cstdint>
#include <vector>

namespace kvferry::cli {

/// A pool that another process made, registered with the device piece by piece when a copy first
/// touches a piece, as a mover does it. @threading one thread. @lifetime the device outlives it.
class PinnedPieces {
 public:
  PinnedPieces(ipc::Device& device, ipc::SharedMapping mapping);
  PinnedPieces(const PinnedPieces&) = delete;
  PinnedPieces& operator=(const PinnedPieces&) = delete;
  ~PinnedPieces();

  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return mapping_.size_bytes(); }
  /// The address of what lies there, registered from now on: all pieces of it. @pre inside the
  /// pool, and not empty.
  [[nodiscard]] ipc::Result<std::byte*> pinned(std::uint64_t offset, std::uint64_t size_bytes);

 private:
  ipc::Device& device_;
  ipc::SharedMapping mapping_;
  std::vector<bool> registered_;
};

}  // namespace kvferry::cli
