// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/calibration.hpp"

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// From a calibration to the copy strategy of a job: pure.
namespace kvferry::cache_manager {

/// What a gather or scatter in the worker's process adds to a slot's copy: waking it, launching,
/// and the way back. Grows when compute leaves it few multiprocessors.
struct HandOverCost {
  double base_us = 200;     ///< Of the smallest one; as measured where nothing else is known.
  double us_per_mib = 2.5;  ///< And for its bytes.
  friend bool operator==(const HandOverCost&, const HandOverCost&) = default;
};

/// What of an arena's ring jobs of one direction have.
struct StagingSlots {
  std::uint64_t bytes = 0;  ///< Of one.
  std::uint32_t count = 0;  ///< As many hand-overs are under way at most.
};
[[nodiscard]] StagingSlots slots_of_direction(const ipc::StagingRing& ring) noexcept;

/// The rule of thumb for an arena of which nothing was measured: block-first arenas directly, small
/// slices gathered where there is a ring.
[[nodiscard]] CopyStrategy strategy_by_rule(const ipc::ArenaLayout& layout);

struct JobShape {
  ipc::CopyDirection direction = ipc::CopyDirection::kDeviceToHost;
  std::span<const std::uint32_t> blocks;  ///< Of each group.
  /// No other job of its direction is under way, so that a hand-over is waited for; else copies of
  /// other jobs hide it, as far as there are slots for them.
  bool alone = true;
  StagingSlots slots;
  bool beside_compute = false;  ///< The worker's device computes meanwhile, or is to be spared.
  /// What would be chosen if nothing had been measured: another one has to be faster than that by
  /// more than kRuleMargin, which is what figures of a second may be wrong by.
  std::optional<CopyStrategy> rule = {};
};
inline constexpr double kRuleMargin = 1.1;
/// Nothing when a group of the job was not measured.
[[nodiscard]] std::optional<double> estimate_us(const Calibration& calibration,
                                                CopyStrategy strategy,
                                                const JobShape& job,
                                                const HandOverCost& hand_over) noexcept;
/// The fastest of the possible ones. kStaged, which runs kernels beside the worker's compute, and
/// kMemcpy, which calls the driver for every chunk, have to be faster than others by more than this
/// factor, unless they are the rule.
inline constexpr double kCostlyMargin = 1.05;
/// For kStaged while the worker computes: beside a decoding graph it takes 4 to 5 % of its speed,
/// and rows take nothing that a plain copy would not (docs/performance.md).
inline constexpr double kBesideComputeMargin = 1.5;
[[nodiscard]] std::optional<CopyStrategy> choose_calibrated(const Calibration& calibration,
                                                            std::span<const CopyStrategy> possible,
                                                            const JobShape& job,
                                                            const HandOverCost& hand_over) noexcept;
/// "strided up to 3 blocks, then staged": choices for jobs of the first group, by size.
[[nodiscard]] std::string describe_choices(const Calibration& calibration,
                                           std::span<const CopyStrategy> possible,
                                           JobShape job,
                                           const HandOverCost& hand_over);
/// What choose_calibrated() may choose from, for an arena with such a ring.
[[nodiscard]] std::vector<CopyStrategy> possible_strategies(const ipc::ArenaLayout& layout);

}  // namespace kvferry::cache_manager
