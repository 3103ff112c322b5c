// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/store_room.hpp"

#include <unordered_set>

namespace kvferry::cache_manager {
namespace {

ipc::Status check_key(const ClientRecord& client, const ipc::StoreKey& key) {
  const EngineRecord& engine = *client.engine;
  const std::uint32_t unit = client.identity.unit_blocks;
  if (unit < ipc::kMostUnitBlocks && (key.parts >> unit) != 0) {
    return KVFERRY_ERROR(kInvalidArgument, "parts {:#x} of a unit of {} blocks", key.parts, unit);
  }
  if (key.block.is_zero()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "a block's hash is zero, which stands for none: name it otherwise");
  }
  if (key.group.value >= engine.config()->shapes.size()) {
    return KVFERRY_ERROR(kInvalidArgument, "engine {} has no group {}", engine.name(),
                         key.group.value);
  }
  if (key.retention &&
      (key.retention->priority > ipc::Retention::kMost || key.retention->duration.count() < 0)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "a retention of priority {} for {} ms: give 0 to {}, and no negative time",
                         key.retention->priority, key.retention->duration.count(),
                         ipc::Retention::kMost);
  }
  return ipc::ok();
}

}  // namespace

ipc::Status check_store_keys(const ClientRecord& client,
                             const ipc::Digest& weights,
                             std::span<const ipc::StoreKey> keys) {
  const EngineRecord& engine = *client.engine;
  if (weights != engine.weights()) {
    return KVFERRY_ERROR(kStaleEpoch,
                         "blocks that were computed with weights {} are not stored for engine {}, "
                         "which has {} now: forget them",
                         weights.hex(), engine.name(), engine.weights().hex());
  }
  for (const ipc::StoreKey& key : keys) KVFERRY_TRY(check_key(client, key));
  return ipc::ok();
}

std::vector<ipc::ReservedSlot> reserve_keys(PrefixIndex& index,
                                            const ClientRecord& client,
                                            std::span<const ipc::StoreKey> keys) {
  std::vector<ipc::ReservedSlot> slots;
  slots.reserve(keys.size());
  std::vector<Extent> extents(client.engine->config()->shapes.size(),
                              Extent{.after = std::nullopt, .left = 0});
  std::unordered_set<ipc::BlockKey> named;   // A request may name a block twice.
  std::unordered_set<ipc::BlockKey> in_use;  // They lack parts, and cannot give way.
  for (const ipc::StoreKey& key : keys) {
    const ipc::BlockKey whole{client.root, key.block, key.group};
    if (key.parts != 0 && !index.drop_lacking(whole, key.parts)) in_use.insert(whole);
    const bool missing = !index.has(whole) && named.insert(whole).second;
    extents[key.group.value].left += missing ? 1U : 0U;
  }
  // The first of them makes room for all: not at the cost of what the others continue.
  std::vector<ipc::BlockKey> continued;
  for (const ipc::StoreKey& key : keys) {
    const ipc::BlockKey before{client.root, key.before, key.group};
    if (!key.before.is_zero() && index.await(before)) continued.push_back(before);
  }
  index.begin_reserving();
  for (const ipc::StoreKey& key : keys) {
    const ipc::BlockKey whole{client.root, key.block, key.group};
    if (key.parts != 0 && in_use.contains(whole)) {
      // Whoever took it for stored would not bring the parts again.
      slots.push_back({.outcome = ipc::ReserveOutcome::kInUse, .slot = 0});
      continue;
    }
    slots.push_back(index.reserve(client.peer.id, whole, key.before, client.shape(key.group),
                                  extents[key.group.value], {client.account, key.retention}));
  }
  for (const ipc::BlockKey& before : continued) index.stop_awaiting(before);
  return slots;
}

}  // namespace kvferry::cache_manager
