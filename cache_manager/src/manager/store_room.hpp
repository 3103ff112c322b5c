// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/wire/store_messages.hpp"
#include "manager/engine_directory.hpp"
#include "manager/prefix_index.hpp"

#include <span>
#include <vector>

namespace kvferry::cache_manager {

/// Whether a client may store blocks under these keys, which it computed with these weights:
/// kStaleEpoch when the engine has others by now, kInvalidArgument for a key that cannot be.
/// @pre the engine has a geometry
[[nodiscard]] ipc::Status check_store_keys(const ClientRecord& client,
                                           const ipc::Digest& weights,
                                           std::span<const ipc::StoreKey> keys);
/// Slots for the keys of one request, which lie together if they can. @pre check_store_keys()
[[nodiscard]] std::vector<ipc::ReservedSlot> reserve_keys(PrefixIndex& index,
                                                          const ClientRecord& client,
                                                          std::span<const ipc::StoreKey> keys);

}  // namespace kvferry::cache_manager
