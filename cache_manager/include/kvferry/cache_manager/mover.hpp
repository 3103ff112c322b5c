// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/rank/rank_config.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cache_manager {

/// How blocks are moved. kAuto: direct for block-first arenas; else staged where the arena has a
/// ring and slices are small, strided rows in its place while the worker computes (but for a share,
/// gathered_percent, and loads that its compute has waited for, more than a tenth of their time)
/// and for what is fetched ahead, else batch; once copies are calibrated, what is faster than that
/// for the job by a tenth. kKernel: by kernels of the mover between blocks and the pool, which
/// without MPS stop whatever else computes on the device. kAgent: by the worker's agent, whose
/// kernels copy straight between blocks and the pool, which the mover lends to it.
enum class CopyStrategy : std::uint8_t {
  kAuto = 1,
  kDirect,
  kStaged,
  kStrided,
  kBatch,
  kMemcpy,
  kKernel,
  kAgent
};
[[nodiscard]] std::string_view to_string(CopyStrategy strategy) noexcept;
[[nodiscard]] ipc::Result<CopyStrategy> parse_copy_strategy(std::string_view text);

/// The strategy for an arena: the forced one where it can be used, else by layout. A forced
/// strategy that the arena cannot do is kInvalidArgument.
[[nodiscard]] ipc::Result<CopyStrategy> choose_strategy(CopyStrategy asked,
                                                        const ipc::ArenaLayout& layout);

/// Whether a mover measures what copies cost, for kAuto. kGpus: not on simulated devices.
enum class CalibrationMode : std::uint8_t { kGpus = 1, kOn, kOff };

/// A load that goes before others that are waited for, too, waits at most for one slot (8 MiB) of
/// them: always (kAlways), at 5 to 10 % of the link, or a quarter of it where they go through the
/// staging ring; or only within 5 s after one had to wait (kAuto): that one waits for up to 32 MiB,
/// and all that go through the ring for two slots. For what is fetched ahead (Urgency::kAhead) none
/// ever waits longer than for one.
enum class UrgentLoads : std::uint8_t { kAuto = 1, kAlways };

struct MoverConfig {
  /// rank.store_rate, load_rate: at most so many bytes are begun in a second, in pieces of a
  /// staging slot or 8 MiB; 0: as many as go over the link. Loads above Urgency::kAhead count, up
  /// to a debt of 100 ms, and do not wait. A job that takes longer than the manager's job_deadline,
  /// with those that were sent before it, is given up.
  ipc::RankConfig rank;
  CopyStrategy strategy = CopyStrategy::kAuto;
  CalibrationMode calibration = CalibrationMode::kGpus;
  /// With kAuto, a job of at most so many bytes that is alone on its way, and not fetched ahead, is
  /// copied as by kAgent; 0: none, and the worker never sees the host pool.
  std::uint64_t agent_swap_bytes = 0;
  /// With kAuto, where a worker computes and jobs come one after another: so many of a hundred
  /// bytes are gathered by its agent, the rest goes in rows. A gather fills the link and costs
  /// compute that lives by device memory 4 to 5 %, rows of 16 KiB reach 70 % of it and cost nothing
  /// (docs/performance.md). At most 100.
  std::uint32_t gathered_percent = 0;
  /// Where the rank's share of the host pool is moved to before it is registered; nothing: to the
  /// nodes that the device is on; none: it stays where the manager has it.
  std::optional<std::vector<int>> numa_nodes;
  /// What it keeps of a pool whose manager was killed, for the next one.
  std::chrono::milliseconds keep_pool{600'000};
  UrgentLoads urgent_loads = UrgentLoads::kAuto;
  std::string cache_dir;  ///< Where calibrations are kept; empty: ipc::default_cache_dir().
};

/// Runs the mover of one rank until SIGTERM, SIGINT or SIGHUP. Throws Exception when it cannot be
/// set up.
void run_mover(const MoverConfig& config);

}  // namespace kvferry::cache_manager
