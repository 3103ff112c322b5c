// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/rank/rank_config.hpp"
#include "kvferry/worker/compute_load.hpp"

#include <optional>
#include <string>

namespace kvferry::cli {

/// A worker that copies by itself: it holds the arena, and does its own DMA into a pool that the
/// engine lends it.
struct CopierConfig {
  ipc::RankConfig rank;                                          ///< Device, geometry and arena.
  std::string socket;                                            ///< Where the engine listens.
  std::optional<worker::ComputeLoadConfig> load = std::nullopt;  ///< Computed all the time.
};

/// Serves the engine until it is gone, or a signal asks for the end. Throws Exception when it
/// cannot begin, or the device or the engine broke its word.
void run_copier(const CopierConfig& config);

}  // namespace kvferry::cli
