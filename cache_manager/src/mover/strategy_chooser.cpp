// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/strategy_chooser.hpp"

#include "mover/staging_fit.hpp"

#include <array>
#include <cstdint>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// Rows of smaller ones reach half of the link and less.
constexpr std::uint64_t kLeastRowBytes = 16ULL << 10;

bool gathers_rows(CopyStrategy strategy, const ipc::ArenaLayout& layout) {
  if (strategy != CopyStrategy::kStaged || !has_slice_rows(layout) || layout.regions.empty()) {
    return false;
  }
  // Scales beside large slices do not count for much: their mean does.
  std::uint64_t bytes = 0;
  for (const ipc::Region& region : layout.regions) bytes += region.block_bytes;
  return bytes / layout.regions.size() >= kLeastRowBytes;
}

}  // namespace

StrategyChooser::StrategyChooser(CopyStrategy fallback,
                                 const ipc::ArenaLayout& layout,
                                 std::uint64_t agent_swap_bytes)
    : fallback_(fallback),
      beside_compute_(gathers_rows(fallback, layout) ? CopyStrategy::kStrided : fallback),
      possible_(possible_strategies(layout)),
      slots_(slots_of_direction(layout.staging)),
      agent_swap_bytes_(agent_swap_bytes) {
  for (const ipc::Region& region : layout.regions) {
    block_bytes_.at(region.group.value) += region.block_bytes;
  }
}

// Items have not been checked yet.
bool StrategyChooser::is_small(const ipc::MoverJob& job) const noexcept {
  std::uint64_t bytes = 0;
  for (const ipc::MoverItem& item : job.items) {
    if (item.group.value < block_bytes_.size()) bytes += block_bytes_.at(item.group.value);
    if (bytes > agent_swap_bytes_) return false;
  }
  return true;
}

void StrategyChooser::adopt(std::shared_ptr<const Calibration> calibration) {
  const std::lock_guard lock(mutex_);
  calibration_ = std::move(calibration);
}

CopyStrategy StrategyChooser::choose(const ipc::MoverJob& job,
                                     bool alone,
                                     const HandOverCost& hand_over,
                                     std::optional<bool> computing,
                                     bool agent) const {
  if (agent_swap_bytes_ > 0 && agent && alone && is_small(job)) return CopyStrategy::kAgent;
  std::shared_ptr<const Calibration> calibration;
  {
    const std::lock_guard lock(mutex_);
    calibration = calibration_;
  }
  const CopyStrategy by_rule = computing.value_or(false) ? beside_compute_ : fallback_;
  if (!calibration) return by_rule;
  std::array<std::uint32_t, ipc::kMaxGroups> blocks{};
  for (const ipc::MoverItem& item : job.items) {
    // Items have not been checked yet.
    if (item.group.value < blocks.size()) ++blocks.at(item.group.value);
  }
  const JobShape shape{job.direction, blocks, alone, slots_, computing.value_or(false)};
  return choose_calibrated(*calibration, possible_, shape, hand_over).value_or(by_rule);
}

}  // namespace kvferry::cache_manager
