// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/arena_source.hpp"

#include <vector>

/// Calls into an engine's code: an exception is its way to say no, never ours to pass on.
namespace kvferry::ipc::lease {

/// A request for every region of the plan.
[[nodiscard]] ArenaRequest make_request(Epoch epoch, const ArenaLayout& plan);

[[nodiscard]] Result<std::vector<RegionMemory>> call_allocate(ArenaSource& source,
                                                              const ArenaRequest& request) noexcept;
[[nodiscard]] Status call_release(ArenaSource& source, Epoch epoch) noexcept;

/// Holds what the engine gave to what was asked for, as far as numbers tell: count, null and
/// alignment of bases, block bytes, strides, bounds. kInvalidArgument names the region, both values
/// and the remedy.
[[nodiscard]] Status check_regions(const ArenaRequest& request,
                                   const std::vector<RegionMemory>& regions);

/// "region 6 (key of layer 3 in group 0)".
[[nodiscard]] std::string region_name(const ArenaRequest& request, std::size_t index);

}  // namespace kvferry::ipc::lease
