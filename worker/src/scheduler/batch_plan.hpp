// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/wire/generation_messages.hpp"
#include "scheduler/sequence.hpp"

#include <cstdint>

namespace kvferry::worker {

/// What one pass may write and read, over all groups.
struct PassLimits {
  std::uint32_t writes = 8192;
  std::uint32_t reads = 131'072;
  std::uint32_t sequences = 64;
};

/// Adds a sequence to a pass: keys and values of its tokens that have none yet, as far as the
/// limits go, and, once all of them have, what attention reads for its last token. Sets `planned`.
/// False when the pass is full: nothing was added. A pass without any sequence takes the first one
/// whatever it reads. Pure. @pre it has blocks for all its tokens
[[nodiscard]] bool add_to_pass(const ipc::Geometry& geometry,
                               const PassLimits& limits,
                               Sequence& sequence,
                               ipc::Decode& pass);

}  // namespace kvferry::worker
