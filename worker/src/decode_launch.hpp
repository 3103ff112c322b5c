// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/wire/generation_messages.hpp"
#include "kvferry/kernels/reference_model.hpp"
#include "kvferry/worker/arena_use.hpp"
#include "kvferry/worker/caching_allocator.hpp"
#include "pinned_pool.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace kvferry::worker {

/// What a pass does in one group.
struct GroupPass {
  std::vector<kernels::TokenWrite> writes;
  std::vector<kernels::TokenRead> reads;
};

/// The pass by group, in the kernels' words. kInvalidArgument for what the arena or the geometry
/// does not have.
[[nodiscard]] ipc::Result<std::vector<GroupPass>> plan_decode(const ipc::Decode& pass,
                                                              const MappedArena& arena,
                                                              std::uint32_t tokens_per_block);

/// A pass of the model that was launched, with what it works on.
struct DecodeWork {
  ScratchBuffer workspace;
  std::unique_ptr<ipc::PinnedBuffer> inputs;
  std::unique_ptr<ipc::PinnedBuffer> outputs;
  std::uint32_t sequences = 0;
};

/// What a pass is launched with.
struct DecodeTools {
  ipc::Stream& stream;
  CachingAllocator& allocator;
  PinnedPool& pinned;
  ipc::DevicePtr tables;  ///< ModelTables::address().
  std::uint32_t tokens_per_block = 0;
};

inline constexpr std::uint32_t kMaxPassSequences = 4096;

/// Enqueues one pass: its inputs go to the device, keys and values are written, attention reads,
/// and a word per sequence comes back. After an error what was enqueued still runs on `work`, which
/// has to live until it was observed complete.
[[nodiscard]] ipc::Status launch_decode(const std::vector<GroupPass>& groups,
                                        std::uint32_t sequences,
                                        const MappedArena& arena,
                                        const DecodeTools& tools,
                                        DecodeWork& work);

/// @pre observed complete; gives the buffers back
[[nodiscard]] ipc::DecodeReply take_outputs(DecodeWork& work, PinnedPool& pinned);

}  // namespace kvferry::worker
