// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/rank/rank_config.hpp"

#include <cstdint>
#include <string>
#include <string_view>

namespace kvferry::cache_manager {

/// How blocks are moved. kAuto: direct for block-first arenas; else what is fastest for the job,
/// when copies are calibrated, and until then staged where the arena has a ring and the group's
/// slices are small, else batch.
enum class CopyStrategy : std::uint8_t { kAuto = 1, kDirect, kStaged, kStrided, kBatch, kMemcpy };
[[nodiscard]] std::string_view to_string(CopyStrategy strategy) noexcept;
[[nodiscard]] ipc::Result<CopyStrategy> parse_copy_strategy(std::string_view text);

/// The strategy for an arena: the forced one where it can be used, else by layout. A forced
/// strategy that the arena cannot do is kInvalidArgument.
[[nodiscard]] ipc::Result<CopyStrategy> choose_strategy(CopyStrategy asked,
                                                        const ipc::ArenaLayout& layout);

/// Whether a mover measures what copies cost, for kAuto. kGpus: not on simulated devices.
enum class CalibrationMode : std::uint8_t { kGpus = 1, kOn, kOff };

struct MoverConfig {
  ipc::RankConfig rank;
  CopyStrategy strategy = CopyStrategy::kAuto;
  CalibrationMode calibration = CalibrationMode::kOff;
  std::string cache_dir;  ///< Where calibrations are kept; empty: ipc::default_cache_dir().
};

/// Runs the mover of one rank until SIGTERM, SIGINT or SIGHUP. Throws Exception when it cannot be
/// set up.
void run_mover(const MoverConfig& config);

}  // namespace kvferry::cache_manager
