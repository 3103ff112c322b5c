// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/strategy_chooser.hpp"

#include <array>
#include <cstdint>
#include <utility>

namespace kvferry::cache_manager {

StrategyChooser::StrategyChooser(CopyStrategy fallback, const ipc::ArenaLayout& layout)
    : fallback_(fallback),
      possible_(possible_strategies(layout)),
      slots_(slots_of_direction(layout.staging)) {}

void StrategyChooser::adopt(std::shared_ptr<const Calibration> calibration) {
  const std::lock_guard lock(mutex_);
  calibration_ = std::move(calibration);
}

CopyStrategy StrategyChooser::choose(const ipc::MoverJob& job,
                                     bool alone,
                                     const HandOverCost& hand_over) const {
  std::shared_ptr<const Calibration> calibration;
  {
    const std::lock_guard lock(mutex_);
    calibration = calibration_;
  }
  if (!calibration) return fallback_;
  std::array<std::uint32_t, ipc::kMaxGroups> blocks{};
  for (const ipc::MoverItem& item : job.items) {
    // Items have not been checked yet.
    if (item.group.value < blocks.size()) ++blocks.at(item.group.value);
  }
  const JobShape shape{job.direction, blocks, alone, slots_};
  return choose_calibrated(*calibration, possible_, shape, hand_over).value_or(fallback_);
}

}  // namespace kvferry::cache_manager
