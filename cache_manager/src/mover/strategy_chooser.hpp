// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/strategy_choice.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <memory>
#include <mutex>
#include <vector>

namespace kvferry::cache_manager {

/// Chooses for each job of one mapped arena: by the rule of thumb until a calibration is there.
/// @threading any.
class StrategyChooser {
 public:
  /// Without a calibration all jobs are copied by `fallback`.
  StrategyChooser(CopyStrategy fallback, const ipc::ArenaLayout& layout);

  void adopt(std::shared_ptr<const Calibration> calibration);
  /// alone: no other job of its direction is under way.
  [[nodiscard]] CopyStrategy choose(const ipc::MoverJob& job,
                                    bool alone,
                                    const HandOverCost& hand_over) const;
  [[nodiscard]] const std::vector<CopyStrategy>& possible() const noexcept { return possible_; }
  [[nodiscard]] const StagingSlots& slots() const noexcept { return slots_; }

 private:
  const CopyStrategy fallback_;
  const std::vector<CopyStrategy> possible_;
  const StagingSlots slots_;
  mutable std::mutex mutex_;  // guards calibration_
  std::shared_ptr<const Calibration> calibration_;
};

}  // namespace kvferry::cache_manager
