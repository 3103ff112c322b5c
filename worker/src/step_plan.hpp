// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/kernels/block_layout.hpp"
#include "worker_arena.hpp"

#include <cstdint>
#include <vector>

namespace kvferry::worker {

/// The largest number of decode passes in one step; more would keep the stream from everybody else.
inline constexpr std::uint32_t kMaxDecodeSteps = 4096;

/// A step's work on one group, in the form that the stream takes.
struct GroupStep {
  std::uint32_t group = 0;
  std::vector<kernels::SeededBlock> fills;
  std::vector<std::uint32_t> reads;
  std::vector<kernels::SeededBlock> verifies;
  std::vector<std::uint32_t> verify_places;  ///< Index of each verify in the step's own list.
};

/// Sorts an untrusted step by group. Errors (kInvalidArgument) name the group or block that is out
/// of range, and a block that is filled twice, whose contents would be anybody's guess. Groups
/// without work are left out. Pure.
[[nodiscard]] ipc::Result<std::vector<GroupStep>> plan_step(const ipc::Step& step,
                                                            const MappedArena& arena);

}  // namespace kvferry::worker
