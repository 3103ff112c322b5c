// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/arena_layout.hpp"

namespace kvferry::cache_manager {

/// The arena's ring has a slot for each direction, and each holds a whole block of any group.
[[nodiscard]] bool can_stage(const ipc::ArenaLayout& layout);
/// Of every group, most of a block's bytes lie in rows for strided copies.
[[nodiscard]] bool has_slice_rows(const ipc::ArenaLayout& layout);

}  // namespace kvferry::cache_manager
