// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/ipc/wire/staging_messages.hpp"
#include "worker_arena.hpp"

namespace kvferry::worker {

/// Holds an untrusted request to the mapped arena: group, region set, slot, block ids, and that the
/// packed blocks fit the slot, or the parts the pool. kInvalidArgument names what is out of range.
/// Pure.
/// @param pool_bytes of the pool that its connection has named
[[nodiscard]] ipc::Status check_stage_request(const ipc::StageRequest& stage,
                                              const MappedArena& arena,
                                              std::uint64_t pool_bytes);

/// What the kernels of a request that was found right move. Pure.
[[nodiscard]] std::uint64_t stage_bytes(const ipc::StageRequest& stage, const MappedArena& arena);

}  // namespace kvferry::worker
