// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "mover/copy_plan.hpp"

#include <span>
#include <vector>

namespace kvferry::cache_manager {

/// Which slices of a block make rows: equal ones of one segment and part whose places follow one
/// distance in the arena and one in the part, K and V of all layers say, or every second of them
/// where two kinds take turns. Each slice is in exactly one; those that make none are alone.
/// Touching slices are joined first. @pre slices are in the order of their parts.
[[nodiscard]] std::vector<BlockParts::SliceRows> find_slice_rows(
    std::span<const BlockParts::Slice> slices);

}  // namespace kvferry::cache_manager
