// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/strategy_chooser.hpp"

#include "mover/staging_fit.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// Rows of smaller ones reach half of the link and less.
constexpr std::uint64_t kLeastRowBytes = 16ULL << 10;
/// Microseconds per MiB that hand-overs may take to be chosen for their speed: a link takes 19.
constexpr double kMostHandOverUs = 12;
constexpr std::int64_t kPercent = 100;

/// The worker's kernels come to their turn in time. Beside products of matrices that take every
/// multiprocessor they do not (docs/performance.md).
bool keeps_up(const HandOverCost& hand_over, const StagingSlots& slots) noexcept {
  const double slot_mib = static_cast<double>(slots.bytes) / (1U << 20U);
  if (slots.count == 0 || slot_mib <= 0) return false;
  const double slot_us = hand_over.base_us + slot_mib * hand_over.us_per_mib;
  return std::max(hand_over.us_per_mib, slot_us / (slot_mib * slots.count)) <= kMostHandOverUs;
}

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
                                 Options options)
    : fallback_(fallback),
      beside_compute_(gathers_rows(fallback, layout) ? CopyStrategy::kStrided : fallback),
      possible_(possible_strategies(layout)),
      slots_(slots_of_direction(layout.staging)),
      options_(options) {
  for (const ipc::Region& region : layout.regions) {
    block_bytes_.at(region.group.value) += region.block_bytes;
  }
}

std::uint64_t StrategyChooser::bytes_of(const ipc::MoverJob& job) const noexcept {
  std::uint64_t bytes = 0;
  for (const ipc::MoverItem& item : job.items) {
    // Items have not been checked yet.
    if (item.group.value < block_bytes_.size()) bytes += block_bytes_.at(item.group.value);
  }
  return bytes;
}

bool StrategyChooser::is_to_be_gathered(const ipc::MoverJob& job) const {
  if (options_.gathered_percent == 0 || fallback_ == beside_compute_) return false;
  const auto bytes = static_cast<std::int64_t>(bytes_of(job));
  const std::lock_guard lock(mutex_);
  std::int64_t& owed = owed_.at(job.direction == ipc::CopyDirection::kDeviceToHost ? 0 : 1);
  owed += bytes * options_.gathered_percent;
  if (owed < bytes * kPercent / 2) return false;
  owed -= bytes * kPercent;
  return true;
}

void StrategyChooser::adopt(std::shared_ptr<const Calibration> calibration) {
  const std::lock_guard lock(mutex_);
  calibration_ = std::move(calibration);
}

CopyStrategy StrategyChooser::choose(const ipc::MoverJob& job,
                                     bool alone,
                                     const HandOverCost& hand_over,
                                     Compute compute,
                                     bool agent) const {
  // What is fetched ahead is enqueued by single slots (CopyDepth), in which rows reach 90 % of the
  // link where a ring reaches 74 (H100, slices of 32 KiB); and it is not worth a multiprocessor.
  const bool ahead = job.direction == ipc::CopyDirection::kHostToDevice &&
                     job.urgency.priority <= ipc::Urgency::kAhead;
  if (agent && alone && !ahead && options_.agent_swap_bytes > 0 &&
      bytes_of(job) <= options_.agent_swap_bytes) {
    return CopyStrategy::kAgent;
  }
  std::shared_ptr<const Calibration> calibration;
  {
    const std::lock_guard lock(mutex_);
    calibration = calibration_;
  }
  const bool beside = compute.now.value_or(false);
  const bool waited_for = compute.waits_for_loads && keeps_up(hand_over, slots_);
  const bool spares_compute = ahead || (beside && !waited_for);
  if (spares_compute && !ahead && !alone && keeps_up(hand_over, slots_) && is_to_be_gathered(job)) {
    return fallback_;
  }
  const CopyStrategy by_rule = spares_compute ? beside_compute_ : fallback_;
  if (!calibration) return by_rule;
  std::array<std::uint32_t, ipc::kMaxGroups> blocks{};
  for (const ipc::MoverItem& item : job.items) {
    // Items have not been checked yet.
    if (item.group.value < blocks.size()) ++blocks.at(item.group.value);
  }
  const JobShape shape{job.direction, blocks, alone, slots_, spares_compute, by_rule};
  return choose_calibrated(*calibration, possible_, shape, hand_over).value_or(by_rule);
}

}  // namespace kvferry::cache_manager
