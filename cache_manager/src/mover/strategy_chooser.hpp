// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/strategy_choice.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace kvferry::cache_manager {

/// Chooses for each job of one mapped arena: by a calibration, or else by a rule of thumb. That is
/// to gather; but where the arena's slices make rows, loads that are fetched ahead go in rows, and
/// so does what is copied while the worker computes, apart from a share of it: a gather costs
/// compute that lives by device memory 4 to 5 % beyond what the rows cost it, which reach two
/// thirds of the link with slices of 16 KiB and nine tenths with 32 KiB (docs/performance.md). Of
/// loads that compute waits for, more than a small part of the time, all are gathered. No share,
/// and none of those, while hand-overs to the worker take longer than the link.
/// Before either: small jobs that are alone, and waited for, go to the worker's agent, if they may.
/// @threading any.
class StrategyChooser {
 public:
  struct Options {
    std::uint64_t agent_swap_bytes = 0;  ///< What the agent copies at most; 0: nothing.
    /// Of the bytes of jobs that come one after another while the worker computes: so many of a
    /// hundred are gathered, the rest goes in rows.
    std::uint32_t gathered_percent = 0;
  };
  /// Of the worker.
  struct Compute {
    std::optional<bool> now = std::nullopt;  ///< Its device computes, if that is known.
    bool waits_for_loads = false;            ///< LoadWaits.
  };
  /// Without a calibration all jobs are copied by `fallback`.
  StrategyChooser(CopyStrategy fallback, const ipc::ArenaLayout& layout, Options options);
  StrategyChooser(CopyStrategy fallback, const ipc::ArenaLayout& layout)
      : StrategyChooser(fallback, layout, Options{}) {}

  void adopt(std::shared_ptr<const Calibration> calibration);
  /// alone: no other job of its direction is under way. agent: it may be asked.
  [[nodiscard]] CopyStrategy choose(const ipc::MoverJob& job,
                                    bool alone,
                                    const HandOverCost& hand_over,
                                    Compute compute,
                                    bool agent = true) const;
  [[nodiscard]] const std::vector<CopyStrategy>& possible() const noexcept { return possible_; }
  /// What jobs get without a calibration, while nothing computes.
  [[nodiscard]] CopyStrategy rule() const noexcept { return fallback_; }
  [[nodiscard]] const StagingSlots& slots() const noexcept { return slots_; }

 private:
  [[nodiscard]] std::uint64_t bytes_of(const ipc::MoverJob& job) const noexcept;
  /// This job's turn to be gathered beside compute.
  [[nodiscard]] bool is_to_be_gathered(const ipc::MoverJob& job) const;

  const CopyStrategy fallback_;
  const CopyStrategy beside_compute_;
  const std::vector<CopyStrategy> possible_;
  const StagingSlots slots_;
  const Options options_;
  std::array<std::uint64_t, ipc::kMaxGroups> block_bytes_{};  ///< By group.
  mutable std::mutex mutex_;                                  // guards what follows
  /// Bytes that are to be gathered beside compute, times 100, by direction; at most half a job's.
  mutable std::array<std::int64_t, 2> owed_{};
  std::shared_ptr<const Calibration> calibration_;
};

}  // namespace kvferry::cache_manager
