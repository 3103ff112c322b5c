// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/copier/messages.hpp"

namespace kvferry::cli {

std::string_view to_string(OwnStrategy strategy) noexcept {
  switch (strategy) {
    case OwnStrategy::kStaged: return "staged";
    case OwnStrategy::kStrided: return "strided";
    case OwnStrategy::kBatch: return "batch";
    case OwnStrategy::kMemcpy: return "memcpy";
    case OwnStrategy::kDirect: return "direct";
  }
  return "invalid";
}

ipc::Status check_copy_request(const CopyRequest& request,
                               std::uint64_t last_id,
                               const CopyBounds& bounds) {
  if (request.id <= last_id) {
    return KVFERRY_ERROR(kProtocol, "request {} came after request {}: their numbers grow",
                         request.id, last_id);
  }
  if (request.items.empty() || request.items.size() > kMostCopyItems) {
    return KVFERRY_ERROR(kInvalidArgument, "request {} has {} blocks, expected 1 to {}", request.id,
                         request.items.size(), kMostCopyItems);
  }
  for (const CopyItem& item : request.items) {
    if (item.group.value >= bounds.groups.size()) {
      return KVFERRY_ERROR(kInvalidArgument, "group {} does not exist, the arena has {}",
                           item.group.value, bounds.groups.size());
    }
    const CopyBounds::Group& group = bounds.groups[item.group.value];
    if (item.block.value >= group.block_count) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "block {} of group {} is out of range, the arena has {}",
                           item.block.value, item.group.value, group.block_count);
    }
    const bool in_pool = item.pool_offset < bounds.pool_bytes &&
                         group.packed_bytes <= bounds.pool_bytes - item.pool_offset;
    if (!in_pool) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "block {} of group {}: {} bytes at {} are not inside the pool of {} "
                           "bytes",
                           item.block.value, item.group.value, group.packed_bytes, item.pool_offset,
                           bounds.pool_bytes);
    }
  }
  return ipc::ok();
}

}  // namespace kvferry::cli
