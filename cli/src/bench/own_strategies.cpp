// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/own_strategies.hpp"

#include <algorithm>

namespace kvferry::cli {

using cache_manager::CopyStrategy;

CopyStrategy mover_strategy(OwnStrategy strategy) noexcept {
  switch (strategy) {
    case OwnStrategy::kStaged: return CopyStrategy::kStaged;
    case OwnStrategy::kStrided: return CopyStrategy::kStrided;
    case OwnStrategy::kBatch: return CopyStrategy::kBatch;
    case OwnStrategy::kMemcpy: return CopyStrategy::kMemcpy;
    case OwnStrategy::kDirect: return CopyStrategy::kDirect;
  }
  return CopyStrategy::kMemcpy;
}

std::vector<OwnStrategy> own_strategies(const BenchConfig& config,
                                        const BenchShape& shape,
                                        const ipc::ArenaOptions& arena) {
  std::vector<OwnStrategy> strategies;
  for (const OwnStrategy strategy : kOwnStrategies) {
    const CopyStrategy same = mover_strategy(strategy);
    const bool wanted = config.strategies.empty() ||
                        std::find(config.strategies.begin(), config.strategies.end(), same) !=
                            config.strategies.end();
    if (wanted && check_strategy(same, shape.geometry, arena)) strategies.push_back(strategy);
  }
  return strategies;
}

std::vector<std::uint32_t> group_blocks_of(const ipc::ArenaLayout& layout) {
  std::vector<std::uint32_t> blocks;
  for (const ipc::GroupLayout& group : layout.groups) blocks.push_back(group.block_count);
  return blocks;
}

}  // namespace kvferry::cli
