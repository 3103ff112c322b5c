// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "stage_check.hpp"

#include "kvferry/ipc/base/size.hpp"

namespace kvferry::worker {

ipc::Status check_stage_request(const ipc::StageRequest& stage, const MappedArena& arena) {
  if (stage.group.value >= arena.groups.size()) {
    return KVFERRY_ERROR(kInvalidArgument, "request {} names group {}; the arena has {} groups",
                         stage.id, stage.group.value, arena.groups.size());
  }
  if (stage.slot >= arena.slots.size()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "request {} names staging slot {}; the ring has {} slots", stage.id,
                         stage.slot, arena.slots.size());
  }
  const GroupView& group = arena.groups[stage.group.value];
  if (group.table(stage.set) == nullptr) {
    return KVFERRY_ERROR(kInvalidArgument, "request {}: group {} has no region in set {}", stage.id,
                         stage.group.value, static_cast<unsigned>(stage.set));
  }
  if (stage.blocks.empty()) {
    return KVFERRY_ERROR(kInvalidArgument, "request {} names no block", stage.id);
  }
  for (const std::uint32_t block : stage.blocks) {
    if (block >= group.block_count) {
      return KVFERRY_ERROR(kInvalidArgument, "request {} names block {} of group {}, which has {}",
                           stage.id, block, stage.group.value, group.block_count);
    }
  }
  std::uint64_t needed = 0;
  if (!ipc::checked_mul(stage.blocks.size(), group.packed(stage.set), needed) ||
      needed > arena.slot_bytes) {
    return KVFERRY_ERROR(kInvalidArgument, "request {}: {} blocks of {} bytes exceed a slot of {}",
                         stage.id, stage.blocks.size(), group.packed(stage.set), arena.slot_bytes);
  }
  return ipc::ok();
}

}  // namespace kvferry::worker
