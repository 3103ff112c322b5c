// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "calibration/measure_bed.hpp"
#include "kvferry/cache_manager/calibration.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {
namespace {

using ipc::Result;
using ipc::Status;

/// Of steps, together: what is not measured by then stays unknown.
constexpr double kBudgetSeconds = 0.85;
/// A step has jobs of so many bytes, and at least one: enough that its start and end do not count,
/// few enough that a job that comes meanwhile has the link soon.
constexpr std::uint64_t kStepBytes = 16ULL << 20;
constexpr std::uint64_t kMostJobsOfStep = 16;
/// Calls for single chunks that are enqueued at a time: a full queue of the driver would hold up
/// whoever copies meanwhile. Of larger jobs the time follows from smaller ones.
constexpr std::uint64_t kMostCallsOfStep = 1024;
constexpr std::size_t kRounds = 3;
/// Steps that jobs disturbed, beyond which it is given up: there is no quiet moment.
constexpr std::uint32_t kMostDisturbed = 200;
constexpr double kLeastUs = 0.01;
constexpr std::array kDirections = {ipc::CopyDirection::kDeviceToHost,
                                    ipc::CopyDirection::kHostToDevice};

class Measurement {
 public:
  Measurement(MeasureBed& bed, const CalibrationSteps& steps) : bed_(bed), steps_(steps) {}

  Status run(std::uint32_t groups, Calibration& calibration);

 private:
  [[nodiscard]] bool spent() const noexcept { return seconds_ > kBudgetSeconds; }
  /// What is timed: `enqueue` is called once for each of `jobs` in a step.
  struct Timed {
    std::uint64_t jobs = 1;
    std::function<Status()> enqueue;
  };
  /// One step that nothing disturbed.
  [[nodiscard]] Result<double> sample(const Timed& timed);
  /// Microseconds of a job of each, as the median of a few rounds, without what it takes to hear of
  /// the end of nothing. Each round has a step of every one, so that whoever uses the link for a
  /// while slows all of them down.
  [[nodiscard]] Result<std::vector<double>> us(const std::vector<Timed>& timed);
  /// Of the first of them, over rounds.
  void note_spread(std::vector<double> samples);
  [[nodiscard]] GroupCurves empty_curves(ipc::GroupId group) const;
  [[nodiscard]] Status add_size(ipc::GroupId group,
                                ipc::CopyDirection direction,
                                std::uint32_t blocks,
                                GroupCurves& curves);

  MeasureBed& bed_;
  const CalibrationSteps& steps_;
  double seconds_ = 0;
  double empty_us_ = 0;
  std::uint32_t disturbed_ = 0;
  std::vector<double> spreads_;  ///< Of large copies: their slowest to their median.
};

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Result<double> Measurement::sample(const Timed& timed) {
  const auto all = [&timed]() -> Status {
    for (std::uint64_t i = 0; i < timed.jobs; ++i) KVFERRY_TRY(timed.enqueue());
    return ipc::ok();
  };
  while (true) {
    if (!steps_.begin()) return KVFERRY_ERROR(kCancelled, "the measurement was stopped");
    KVFERRY_ASSIGN(const double seconds, bed_.time(all));
    seconds_ += seconds;
    if (steps_.counts()) return seconds;
    if (++disturbed_ > kMostDisturbed) {
      return KVFERRY_ERROR(kBusy, "jobs came during {} steps: the device has no quiet moment",
                           disturbed_);
    }
  }
}

Result<std::vector<double>> Measurement::us(const std::vector<Timed>& timed) {
  std::vector<std::vector<double>> samples(timed.size());
  for (std::size_t round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < timed.size(); ++i) {
      KVFERRY_ASSIGN(const double seconds, sample(timed[i]));
      samples[i].push_back(seconds);
    }
  }
  note_spread(samples.front());
  std::vector<double> of_one;
  for (std::size_t i = 0; i < timed.size(); ++i) {
    const double step_us = median(samples[i]) * 1e6 - empty_us_;
    const auto jobs = static_cast<double>(std::max<std::uint64_t>(1, timed[i].jobs));
    of_one.push_back(std::max(step_us, kLeastUs) / jobs);
  }
  return of_one;
}

void Measurement::note_spread(std::vector<double> samples) {
  const double slowest = *std::max_element(samples.begin(), samples.end());
  const double typical = median(samples);
  if (typical > 0) spreads_.push_back(slowest / typical);
}

GroupCurves Measurement::empty_curves(ipc::GroupId group) const {
  GroupCurves curves;
  curves.block_bytes = bed_.block_bytes(group);
  curves.regions = bed_.regions(group);
  return curves;
}

Status Measurement::add_size(ipc::GroupId group,
                             ipc::CopyDirection direction,
                             std::uint32_t blocks,
                             GroupCurves& curves) {
  const std::uint64_t job_bytes = blocks * curves.block_bytes;
  const std::uint64_t jobs = std::clamp<std::uint64_t>(kStepBytes / job_bytes, 1, kMostJobsOfStep);
  std::vector<Timed> timed{{jobs, [&] { return bed_.enqueue_large(direction, job_bytes); }}};
  std::vector<std::size_t> place;  // of strategies, in timed; 0: it follows from a smaller job
  for (const CopyStrategy strategy : kMeasuredStrategies) {
    const std::uint64_t calls =
        strategy == CopyStrategy::kMemcpy ? std::uint64_t{blocks} * curves.regions : 1;
    const bool follows = calls > kMostCallsOfStep && !curves.blocks.empty();
    place.push_back(follows ? 0 : timed.size());
    if (follows) continue;
    const std::uint64_t fewer = std::clamp<std::uint64_t>(kMostCallsOfStep / calls, 1, jobs);
    timed.push_back({fewer, [this, strategy, direction, group, blocks] {
                       return bed_.enqueue_job(strategy, direction, group, blocks);
                     }});
  }
  KVFERRY_ASSIGN(const std::vector<double> each, us(timed));
  const double large_us = each.front();
  std::array<double, kMeasuredStrategies.size()> measured{};
  for (std::size_t i = 0; i < measured.size(); ++i) {
    if (place[i] != 0) {
      measured.at(i) = each[place[i]];
      continue;
    }
    const double smaller_us = curves.strategies[i].us.back();
    measured.at(i) = std::max(large_us, smaller_us * blocks / curves.blocks.back());
  }
  if (curves.blocks.empty()) {
    for (const CopyStrategy strategy : kMeasuredStrategies) {
      curves.strategies.push_back({strategy, {}});
    }
  }
  curves.blocks.push_back(blocks);
  curves.large_us.push_back(large_us);
  for (std::size_t i = 0; i < measured.size(); ++i) {
    curves.strategies[i].us.push_back(measured.at(i));
  }
  return ipc::ok();
}

Status Measurement::run(std::uint32_t groups, Calibration& calibration) {
  // Pages, clocks and the driver's own first times.
  for (const auto direction : kDirections) {
    KVFERRY_TRY(us(
        {{1, [&] { return bed_.enqueue_large(direction, bed_.block_bytes(ipc::GroupId{0})); }}}));
  }
  KVFERRY_ASSIGN(const std::vector<double> empty, us({{0, [] { return ipc::ok(); }}}));
  empty_us_ = empty.front();
  spreads_.clear();
  std::vector<std::uint32_t> sizes;
  for (std::uint32_t blocks = 1; blocks < bed_.blocks(); blocks *= 4) sizes.push_back(blocks);
  sizes.push_back(bed_.blocks());
  for (std::uint32_t g = 0; g < groups; ++g) {
    const ipc::GroupId group{g};
    calibration.to_host.push_back(empty_curves(group));
    calibration.to_device.push_back(empty_curves(group));
    // Both ways of a size before the next one: those that there is no time for are continued from
    // the others.
    for (const std::uint32_t blocks : sizes) {
      if (spent()) break;
      KVFERRY_TRY(
          add_size(group, ipc::CopyDirection::kDeviceToHost, blocks, calibration.to_host.back()));
      KVFERRY_TRY(
          add_size(group, ipc::CopyDirection::kHostToDevice, blocks, calibration.to_device.back()));
    }
  }
  const double spread = spreads_.empty() ? 1 : median(spreads_);
  if (spread > steps_.most_spread) {
    return KVFERRY_ERROR(kBusy,
                         "large copies took up to {:.2f} times as long as most of them, {:.2f} is "
                         "allowed: others use the link; measure again when it is quiet",
                         spread, steps_.most_spread);
  }
  return check_calibration(calibration);
}

}  // namespace

Result<Calibration> measure_calibration(ipc::Device& device,
                                        const ipc::Geometry& geometry,
                                        ipc::ArenaOrder order,
                                        const CalibrationSteps& steps) {
  Calibration calibration;
  KVFERRY_ASSIGN(calibration.key, calibration_key(device, geometry, order));
  if (!steps.begin()) return KVFERRY_ERROR(kCancelled, "the measurement was stopped");
  KVFERRY_ASSIGN(const std::unique_ptr<MeasureBed> bed, MeasureBed::make(device, geometry, order));
  if (!steps.take_device()) return KVFERRY_ERROR(kCancelled, "the measurement was stopped");
  Status measured = bed->take_device();
  if (measured) {
    Measurement measurement(*bed, steps);
    measured = measurement.run(static_cast<std::uint32_t>(geometry.groups.size()), calibration);
  }
  bed->give_device_back();
  steps.gave_device_back();
  KVFERRY_TRY(measured);
  return calibration;
}

}  // namespace kvferry::cache_manager
