// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "stage_check.hpp"

#include "kvferry/ipc/base/size.hpp"

namespace kvferry::worker {

namespace {

/// Of one request, and a block: movers cut their jobs earlier.
constexpr std::uint64_t kMostStraightBytes = 16ULL << 20;

bool has_kernel(ipc::StageKind kind) {
  return kind == ipc::StageKind::kGather || kind == ipc::StageKind::kScatter;
}

bool copies_straight(ipc::StageKind kind) {
  return kind == ipc::StageKind::kStore || kind == ipc::StageKind::kLoad;
}

ipc::Status check_layers(const ipc::StageRequest& stage) {
  const ipc::StageLayers& layers = *stage.layers;
  if (layers.range.first < layers.range.end && layers.range.end <= ipc::kMaxLayers &&
      layers.through <= layers.range.end) {
    return ipc::ok();
  }
  return KVFERRY_ERROR(
      kInvalidArgument, "request {} is of the layers {} to {} and through {}; there are at most {}",
      stage.id, layers.range.first, layers.range.end, layers.through, ipc::kMaxLayers);
}

ipc::Status check_blocks(const ipc::StageRequest& stage, const MappedArena& arena) {
  if (stage.group.value >= arena.groups.size()) {
    return KVFERRY_ERROR(kInvalidArgument, "request {} names group {}; the arena has {} groups",
                         stage.id, stage.group.value, arena.groups.size());
  }
  if (stage.blocks.empty()) {
    return KVFERRY_ERROR(kInvalidArgument, "request {} names no block", stage.id);
  }
  const GroupView& group = arena.groups[stage.group.value];
  for (const std::uint32_t block : stage.blocks) {
    if (block >= group.block_count) {
      return KVFERRY_ERROR(kInvalidArgument, "request {} names block {} of group {}, which has {}",
                           stage.id, block, stage.group.value, group.block_count);
    }
  }
  return ipc::ok();
}

ipc::Status check_set(const ipc::StageRequest& stage, const GroupView& group, ipc::RegionSet set) {
  if (group.table(set) != nullptr) return ipc::ok();
  return KVFERRY_ERROR(kInvalidArgument, "request {}: group {} has no region in set {}", stage.id,
                       stage.group.value, static_cast<unsigned>(set));
}

ipc::Status check_staged(const ipc::StageRequest& stage, const MappedArena& arena) {
  KVFERRY_TRY(check_blocks(stage, arena));
  if (stage.slot >= arena.slots.size()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "request {} names staging slot {}; the ring has {} slots", stage.id,
                         stage.slot, arena.slots.size());
  }
  const GroupView& group = arena.groups[stage.group.value];
  KVFERRY_TRY(check_set(stage, group, stage.set));
  const std::uint64_t block_bytes =
      stage.layers ? group.packed(stage.set, stage.layers->range) : group.packed(stage.set);
  if (stage.layers && block_bytes == 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "request {}: group {} has no region of the layers {} to {} in set {}",
                         stage.id, stage.group.value, stage.layers->range.first,
                         stage.layers->range.end, static_cast<unsigned>(stage.set));
  }
  std::uint64_t needed = 0;
  if (!ipc::checked_mul(stage.blocks.size(), block_bytes, needed) || needed > arena.slot_bytes) {
    return KVFERRY_ERROR(kInvalidArgument, "request {}: {} blocks of {} bytes exceed a slot of {}",
                         stage.id, stage.blocks.size(), block_bytes, arena.slot_bytes);
  }
  return ipc::ok();
}

ipc::Status check_part(const ipc::StageRequest& stage,
                       const ipc::StagePart& part,
                       const GroupView& group,
                       std::uint64_t pool_bytes) {
  KVFERRY_TRY(check_set(stage, group, part.set));
  if (part.set == ipc::RegionSet::kAll) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "request {}: what is sharded and what is replicated lie apart in a pool",
                         stage.id);
  }
  const std::uint64_t blocks = stage.blocks.size();
  if (part.count == 0 || part.first > blocks || part.count > blocks - part.first) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "request {}: a part of {} blocks from the {}th on, of {} blocks", stage.id,
                         part.count, part.first, blocks);
  }
  std::uint64_t needed = 0;
  if (!ipc::checked_mul(std::uint64_t{part.count}, group.packed(part.set), needed) ||
      needed > pool_bytes || part.pool_offset > pool_bytes - needed) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "request {}: {} blocks of {} bytes at {} exceed a pool of {}", stage.id,
                         part.count, group.packed(part.set), part.pool_offset, pool_bytes);
  }
  return ipc::ok();
}

ipc::Status check_straight(const ipc::StageRequest& stage,
                           const MappedArena& arena,
                           std::uint64_t pool_bytes) {
  if (stage.layers) {
    return KVFERRY_ERROR(kInvalidArgument, "request {} goes by layers, and straight to a pool",
                         stage.id);
  }
  KVFERRY_TRY(check_blocks(stage, arena));
  // What is sharded of each block, and what is replicated: each part is a launch.
  if (stage.parts.empty() || stage.parts.size() > 2 * stage.blocks.size()) {
    return KVFERRY_ERROR(kInvalidArgument, "request {} of {} blocks names {} places of a pool",
                         stage.id, stage.blocks.size(), stage.parts.size());
  }
  const GroupView& group = arena.groups[stage.group.value];
  std::uint64_t sharded = 0;
  std::uint64_t replicated = 0;
  for (const ipc::StagePart& part : stage.parts) {
    KVFERRY_TRY(check_part(stage, part, group, pool_bytes));
    (part.set == ipc::RegionSet::kReplicated ? replicated : sharded) += part.count;
  }
  // What was launched cannot be stopped any more.
  if (sharded > stage.blocks.size() || replicated > stage.blocks.size()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "request {} copies {} sharded and {} replicated parts of {} blocks",
                         stage.id, sharded, replicated, stage.blocks.size());
  }
  const std::uint64_t bytes = stage_bytes(stage, arena);
  const std::uint64_t most = kMostStraightBytes + group.packed(ipc::RegionSet::kAll);
  if (bytes > most) {
    return KVFERRY_ERROR(kInvalidArgument, "request {} copies {} bytes straight, at most {} may be",
                         stage.id, bytes, most);
  }
  return ipc::ok();
}

}  // namespace

ipc::Status check_stage_request(const ipc::StageRequest& stage,
                                const MappedArena& arena,
                                std::uint64_t pool_bytes) {
  if (stage.layers) KVFERRY_TRY(check_layers(stage));
  if (copies_straight(stage.kind)) return check_straight(stage, arena, pool_bytes);
  if (!stage.parts.empty()) {
    return KVFERRY_ERROR(kInvalidArgument, "request {} of kind {} names {} places of a pool",
                         stage.id, static_cast<unsigned>(stage.kind), stage.parts.size());
  }
  if (!has_kernel(stage.kind)) {
    if (stage.layers && stage.blocks.empty()) return ipc::ok();
    return KVFERRY_ERROR(kInvalidArgument,
                         "request {} of kind {} names {} blocks and {} layers; it needs layers and "
                         "no block",
                         stage.id, static_cast<unsigned>(stage.kind), stage.blocks.size(),
                         stage.layers ? "" : "no");
  }
  return check_staged(stage, arena);
}

std::uint64_t stage_bytes(const ipc::StageRequest& stage, const MappedArena& arena) {
  if (stage.blocks.empty()) return 0;
  const GroupView& group = arena.groups[stage.group.value];
  if (!copies_straight(stage.kind)) return stage.blocks.size() * group.packed(stage.set);
  std::uint64_t bytes = 0;
  for (const ipc::StagePart& part : stage.parts) bytes += part.count * group.packed(part.set);
  return bytes;
}

}  // namespace kvferry::worker
