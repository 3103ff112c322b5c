// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/model/geometry.hpp"

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

/// What copies of a geometry's blocks cost on a device.
namespace kvferry::cache_manager {

/// Grows with whatever changes what is measured, or what it means.
inline constexpr std::uint32_t kCalibrationVersion = 2;

/// What a mover can do without touching the compute: copy engines alone. Of kStaged it measures its
/// own part, the copies between slots and host memory; what the worker's part takes, it learns from
/// jobs (HandOverCost).
inline constexpr std::array kMeasuredStrategies = {CopyStrategy::kStaged, CopyStrategy::kStrided,
                                                   CopyStrategy::kBatch, CopyStrategy::kMemcpy};

/// What a calibration holds for: anything else is measured anew.
struct CalibrationKey {
  std::uint32_t version = kCalibrationVersion;
  ipc::DeviceIdentity device;
  ipc::ArenaOrder order = ipc::ArenaOrder::kLayerFirst;
  ipc::Digest fingerprint;  ///< Geometry::fingerprint(order).
  friend bool operator==(const CalibrationKey&, const CalibrationKey&) = default;
};
/// "the driver is '580.159.03', was '575.51'"; empty when they are the same.
[[nodiscard]] std::string difference(const CalibrationKey& now, const CalibrationKey& then);

/// Microseconds of a job with so many blocks of one group, in one direction, when such jobs follow
/// each other.
struct StrategyCurve {
  CopyStrategy strategy = CopyStrategy::kBatch;
  std::vector<double> us;  ///< For each of GroupCurves::blocks.
  friend bool operator==(const StrategyCurve&, const StrategyCurve&) = default;
};

struct GroupCurves {
  std::uint64_t block_bytes = 0;          ///< On this rank.
  std::uint32_t regions = 0;              ///< Chunks of a block.
  std::vector<std::uint32_t> blocks;      ///< Of a job, growing; empty: not measured.
  std::vector<double> large_us;           ///< One copy of as many bytes in one piece.
  std::vector<StrategyCurve> strategies;  ///< One for each of kMeasuredStrategies.
  friend bool operator==(const GroupCurves&, const GroupCurves&) = default;
};

struct Calibration {
  CalibrationKey key;
  std::vector<GroupCurves> to_host;  ///< One for each group of the geometry.
  std::vector<GroupCurves> to_device;
  friend bool operator==(const Calibration&, const Calibration&) = default;

  [[nodiscard]] const std::vector<GroupCurves>& of(ipc::CopyDirection direction) const noexcept {
    return direction == ipc::CopyDirection::kDeviceToHost ? to_host : to_device;
  }
};
/// Holds all counts and figures to what can be used; names what is wrong.
[[nodiscard]] ipc::Status check_calibration(const Calibration& calibration);

/// Who measures beside jobs is asked around every timed step, which takes a few milliseconds.
/// CalibrationSteps::most_spread on GPUs. Of a link that nobody else uses it is a few percent
/// (H100); one that others use all the time, and as much, is not told from a slower one.
inline constexpr double kMostCalibrationSpread = 1.25;

struct CalibrationSteps {
  /// Waits until a step may be taken. False: measuring ends, as kCancelled.
  std::function<bool()> begin = [] { return true; };
  /// Before memory and a stream of the device are taken; those of the host are there. False:
  /// measuring ends, as kCancelled.
  std::function<bool()> take_device = [] { return true; };
  /// After take_device() was true: nothing of the device is held any more.
  std::function<void()> gave_device_back = [] {};
  /// Nothing disturbed the step that was just taken; else it is taken again.
  std::function<bool()> counts = [] { return true; };
  /// How many times as long as the median the slowest of a few large copies may take, for most
  /// sizes: beyond that others use the link too much for figures to mean anything, and measuring
  /// ends as kBusy.
  double most_spread = std::numeric_limits<double>::infinity();
};
[[nodiscard]] ipc::Result<CalibrationKey> calibration_key(const ipc::Device& device,
                                                          const ipc::Geometry& geometry,
                                                          ipc::ArenaOrder order);
/// Measures with memory of its own, at most 64 MiB on the device and as much pinned on the host,
/// all given back at the end: nobody's arena or pool is touched. Takes less than a second of steps;
/// groups that it does not come to stay without curves. kNoDeviceMemory, kInvalidArgument for
/// blocks that are too large for that memory, kBusy (see CalibrationSteps), and whatever the device
/// says.
[[nodiscard]] ipc::Result<Calibration> measure_calibration(ipc::Device& device,
                                                           const ipc::Geometry& geometry,
                                                           ipc::ArenaOrder order,
                                                           const CalibrationSteps& steps = {});

}  // namespace kvferry::cache_manager
