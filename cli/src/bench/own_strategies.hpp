// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/bench.hpp"
#include "bench/copier/messages.hpp"
#include "bench/shape.hpp"
#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"

#include <cstdint>
#include <vector>

namespace kvferry::cli {

/// What a mover calls it.
[[nodiscard]] cache_manager::CopyStrategy mover_strategy(OwnStrategy strategy) noexcept;
/// Those of the configuration (all where it names none) that such an arena can do, and that a
/// worker that copies by itself has, too.
[[nodiscard]] std::vector<OwnStrategy> own_strategies(const BenchConfig& config,
                                                      const BenchShape& shape,
                                                      const ipc::ArenaOptions& arena);
[[nodiscard]] std::vector<std::uint32_t> group_blocks_of(const ipc::ArenaLayout& layout);

}  // namespace kvferry::cli
