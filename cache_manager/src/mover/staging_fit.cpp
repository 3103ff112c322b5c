// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/staging_fit.hpp"

#include "mover/copy_plan.hpp"

#include <cstdint>

namespace kvferry::cache_manager {

bool can_stage(const ipc::ArenaLayout& layout) {
  if (layout.staging.slots < 2) return false;
  const BlockParts parts(layout);
  for (std::uint32_t group = 0; group < layout.groups.size(); ++group) {
    const ipc::GroupId id{group};
    if (parts.replicated_bytes(id) + parts.sharded_bytes(id) > layout.staging.slot_bytes) {
      return false;
    }
  }
  return true;
}

bool has_slice_rows(const ipc::ArenaLayout& layout) {
  const BlockParts parts(layout);
  for (std::uint32_t group = 0; group < layout.groups.size(); ++group) {
    const ipc::GroupId id{group};
    std::uint64_t in_rows = 0;
    for (const BlockParts::SliceRows& rows : parts.slice_rows(id)) {
      if (rows.rows > 1) in_rows += rows.rows * rows.first.size_bytes;
    }
    if (2 * in_rows <= parts.replicated_bytes(id) + parts.sharded_bytes(id)) return false;
  }
  return true;
}

}  // namespace kvferry::cache_manager
