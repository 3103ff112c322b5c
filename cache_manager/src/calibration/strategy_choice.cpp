// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/strategy_choice.hpp"

#include "mover/copy_plan.hpp"
#include "mover/staging_fit.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace kvferry::cache_manager {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;
/// Job sizes that describe_choices() looks at, one by one.
constexpr std::uint32_t kMostDescribed = 1024;

/// Slices below this size reach the link's speed only when gathered first (docs/performance.md).
constexpr std::uint64_t kSmallSliceBytes = 1ULL << 20;

bool has_small_slices(const ipc::ArenaLayout& layout) {
  return std::any_of(layout.regions.begin(), layout.regions.end(), [](const ipc::Region& region) {
    return region.block_bytes < kSmallSliceBytes;
  });
}

/// Between measured sizes by a straight line, beyond them in proportion.
double on_curve(const std::vector<std::uint32_t>& sizes,
                const std::vector<double>& us,
                std::uint32_t blocks) noexcept {
  const auto above = std::lower_bound(sizes.begin(), sizes.end(), blocks);
  if (above == sizes.end()) return us.back() * blocks / sizes.back();
  const auto i = static_cast<std::size_t>(above - sizes.begin());
  if (*above == blocks || i == 0) return us[i];
  const double part = static_cast<double>(blocks - sizes[i - 1]) / (sizes[i] - sizes[i - 1]);
  return us[i - 1] + part * (us[i] - us[i - 1]);
}

const StrategyCurve* curve_of(const GroupCurves& group, CopyStrategy strategy) noexcept {
  for (const StrategyCurve& curve : group.strategies) {
    if (curve.strategy == strategy) return &curve;
  }
  return nullptr;
}

}  // namespace

CopyStrategy strategy_by_rule(const ipc::ArenaLayout& layout) {
  if (layout.order == ipc::ArenaOrder::kBlockFirst) return CopyStrategy::kDirect;
  if (can_stage(layout) && has_small_slices(layout)) return CopyStrategy::kStaged;
  return CopyStrategy::kBatch;
}

StagingSlots slots_of_direction(const ipc::StagingRing& ring) noexcept {
  return {ring.slot_bytes, ring.slots / 2};
}

std::optional<double> estimate_us(const Calibration& calibration,
                                  CopyStrategy strategy,
                                  const JobShape& job,
                                  const HandOverCost& hand_over) noexcept {
  const std::vector<GroupCurves>& groups = calibration.of(job.direction);
  double copies_us = 0;
  double mib = 0;
  for (std::size_t g = 0; g < job.blocks.size(); ++g) {
    if (job.blocks[g] == 0) continue;
    if (g >= groups.size() || groups[g].blocks.empty()) return std::nullopt;
    const StrategyCurve* curve = curve_of(groups[g], strategy);
    if (curve == nullptr) return std::nullopt;
    copies_us += on_curve(groups[g].blocks, curve->us, job.blocks[g]);
    mib += static_cast<double>(groups[g].block_bytes) * job.blocks[g] / kMiB;
  }
  if (copies_us <= 0) return std::nullopt;
  if (strategy != CopyStrategy::kStaged) return copies_us;
  // Gathers and copies of different slots run side by side, but for the first or last one.
  const double both = std::max(copies_us, mib * hand_over.us_per_mib);
  const double slot_mib = std::min(mib, static_cast<double>(job.slots.bytes) / kMiB);
  const double one_slot_us = hand_over.base_us + slot_mib * hand_over.us_per_mib;
  if (job.alone) return both + one_slot_us;
  if (job.slots.count == 0 || slot_mib <= 0) return both;
  return std::max(both, std::ceil(mib / slot_mib) * one_slot_us / job.slots.count);
}

std::optional<CopyStrategy> choose_calibrated(const Calibration& calibration,
                                              std::span<const CopyStrategy> possible,
                                              const JobShape& job,
                                              const HandOverCost& hand_over) noexcept {
  std::optional<CopyStrategy> best;
  double best_us = 0;
  for (const CopyStrategy strategy : possible) {
    std::optional<double> us = estimate_us(calibration, strategy, job, hand_over);
    if (!us) return std::nullopt;
    if (strategy == job.rule) {
      *us /= kRuleMargin;  // which knows what it costs
    } else if (strategy == CopyStrategy::kStaged && job.beside_compute) {
      *us *= kBesideComputeMargin;
    } else if (strategy == CopyStrategy::kStaged || strategy == CopyStrategy::kMemcpy) {
      *us *= kCostlyMargin;
    }
    if (best && *us >= best_us) continue;
    best = strategy;
    best_us = *us;
  }
  return best;
}

std::string describe_choices(const Calibration& calibration,
                             std::span<const CopyStrategy> possible,
                             JobShape job,
                             const HandOverCost& hand_over) {
  std::string text;
  std::optional<CopyStrategy> last;
  for (std::uint32_t blocks = 1; blocks <= kMostDescribed; ++blocks) {
    job.blocks = {&blocks, 1};
    const auto choice = choose_calibrated(calibration, possible, job, hand_over);
    if (!choice) return "unknown";
    if (choice == last) continue;
    if (last) text += fmt::format(" up to {} block{}, ", blocks - 1, blocks == 2 ? "" : "s");
    text += to_string(*choice);
    last = choice;
  }
  return text;
}

std::vector<CopyStrategy> possible_strategies(const ipc::ArenaLayout& layout) {
  std::vector<CopyStrategy> possible;
  for (const CopyStrategy strategy : kMeasuredStrategies) {
    if (strategy == CopyStrategy::kStaged && !can_stage(layout)) continue;
    if (strategy == CopyStrategy::kStrided && !has_slice_rows(layout)) continue;
    possible.push_back(strategy);
  }
  return possible;
}

}  // namespace kvferry::cache_manager
