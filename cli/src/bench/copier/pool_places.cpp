// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/copier/pool_places.hpp"

#include "bench/copier/messages.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <utility>

namespace kvferry::cli {

PoolPlaces::PoolPlaces(const ipc::ArenaLayout& layout, std::uint64_t pool_bytes)
    : packed_bytes_(layout.groups.size(), 0), pool_bytes_(pool_bytes) {
  for (const ipc::Region& region : layout.regions) {
    packed_bytes_.at(region.group.value) += region.block_bytes;
  }
}

ipc::Result<const std::vector<std::uint64_t>*> PoolPlaces::of(
    std::uint64_t handle, const std::vector<worker::SequenceItem>& blocks) {
  if (const auto known = places_.find(handle); known != places_.end()) return &known->second;
  std::vector<std::uint64_t> offsets;
  std::uint64_t next = next_;
  for (const worker::SequenceItem& item : blocks) {
    const std::uint64_t size_bytes = packed_bytes(item.group);
    // A larger one is copied in several pieces wherever it begins.
    if (size_bytes <= kCopyPieceBytes && next % kCopyPieceBytes + size_bytes > kCopyPieceBytes) {
      next = ipc::align_up(next, kCopyPieceBytes);
    }
    if (next + size_bytes > pool_bytes_) {
      return KVFERRY_ERROR(kNoHostMemory, "a job of {} blocks at {} does not fit the pool of {}",
                           blocks.size(), next_, ipc::format_size(pool_bytes_));
    }
    offsets.push_back(next);
    next += size_bytes;
  }
  next_ = next;
  return &places_.emplace(handle, std::move(offsets)).first->second;
}

void PoolPlaces::drop(std::uint64_t handle) {
  places_.erase(handle);
  if (places_.empty()) next_ = 0;
}

}  // namespace kvferry::cli
