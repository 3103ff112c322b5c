// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "worker_arena.hpp"

namespace kvferry::worker {

/// Holds an untrusted request to the mapped arena: group, region set, slot, block ids, and that the
/// packed blocks fit the slot. kInvalidArgument names what is out of range. Pure.
[[nodiscard]] ipc::Status check_stage_request(const ipc::StageRequest& stage,
                                              const MappedArena& arena);

}  // namespace kvferry::worker
