// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/pool_mapping.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {

ipc::Result<std::shared_ptr<PoolMapping>> PoolMapping::map(ipc::Device& device,
                                                           ipc::UniqueFd fd,
                                                           std::uint64_t size_bytes) {
  KVFERRY_ASSIGN(ipc::SharedMapping mapping, ipc::SharedMemory::map_pool(fd, size_bytes));
  // The descriptor is closed here: the mapping alone keeps the pool, and ends with this object.
  return std::shared_ptr<PoolMapping>(new PoolMapping(device, std::move(mapping), size_bytes));
}

PoolMapping::PoolMapping(ipc::Device& device, ipc::SharedMapping mapping, std::uint64_t size_bytes)
    : device_(device),
      mapping_(std::move(mapping)),
      size_bytes_(size_bytes),
      registered_((size_bytes + kPieceBytes - 1) / kPieceBytes, false) {}

PoolMapping::~PoolMapping() {
  for (std::size_t piece = 0; piece < registered_.size(); ++piece) {
    if (!registered_[piece]) continue;
    if (const ipc::Status status = device_.unregister_host(mapping_.data() + piece * kPieceBytes);
        !status) {
      ipc::log_warn("pool piece {} not unregistered: {}", piece, status.error().to_string());
    }
  }
}

ipc::Result<void*> PoolMapping::pinned(std::uint64_t offset, std::uint64_t size_bytes) {
  const std::size_t piece = offset / kPieceBytes;
  if (piece >= registered_.size() || size_bytes > size_bytes_ - offset ||
      (offset + size_bytes - 1) / kPieceBytes != piece) {
    return KVFERRY_ERROR(kInvalidArgument, "pool range at {} of {} bytes is not inside one piece",
                         offset, size_bytes);
  }
  const std::lock_guard lock(mutex_);
  if (!registered_[piece]) {
    const std::uint64_t start = piece * kPieceBytes;
    KVFERRY_TRY(
        device_.register_host(mapping_.data() + start, std::min(kPieceBytes, size_bytes_ - start)));
    registered_[piece] = true;
  }
  return static_cast<void*>(mapping_.data() + offset);
}

}  // namespace kvferry::cache_manager
