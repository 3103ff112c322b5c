// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/cache_manager/calibration.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using ipc::Status;

constexpr std::uint64_t kMostBlockBytes = 1ULL << 40;
constexpr std::uint32_t kMostBlocks = 1U << 20;
constexpr std::size_t kMostPoints = 32;
constexpr double kMostUs = 1e9;
constexpr std::size_t kLongestText = 256;

Status check_figures(const std::vector<double>& us, std::size_t count, std::string_view what) {
  if (us.size() != count) {
    return KVFERRY_ERROR(kProtocol, "calibration: {} has {} figures for {} job sizes", what,
                         us.size(), count);
  }
  for (const double value : us) {
    if (std::isfinite(value) && value > 0 && value <= kMostUs) continue;
    return KVFERRY_ERROR(kProtocol, "calibration: {} takes {} us, expected more than 0 to {}", what,
                         value, kMostUs);
  }
  return ipc::ok();
}

Status check_group(const GroupCurves& group) {
  if (group.block_bytes == 0 || group.block_bytes > kMostBlockBytes || group.regions == 0 ||
      group.regions > ipc::kMaxRegionsPerGroup) {
    return KVFERRY_ERROR(kProtocol,
                         "calibration: a block of {} bytes in {} chunks, expected 1 to {} bytes in "
                         "1 to {}",
                         group.block_bytes, group.regions, kMostBlockBytes,
                         ipc::kMaxRegionsPerGroup);
  }
  const auto& blocks = group.blocks;
  const bool grows =
      std::adjacent_find(blocks.begin(), blocks.end(), std::greater_equal<>()) == blocks.end();
  if (!blocks.empty() && (blocks.front() != 1 || blocks.back() > kMostBlocks || !grows ||
                          blocks.size() > kMostPoints)) {
    return KVFERRY_ERROR(kProtocol,
                         "calibration: job sizes [{}], expected at most {} that grow from 1 to at "
                         "most {}",
                         fmt::join(blocks, ", "), kMostPoints, kMostBlocks);
  }
  KVFERRY_TRY(check_figures(group.large_us, blocks.size(), "one large copy"));
  const std::size_t strategies = blocks.empty() ? 0 : kMeasuredStrategies.size();
  if (group.strategies.size() != strategies) {
    return KVFERRY_ERROR(kProtocol, "calibration: {} strategies, expected {}",
                         group.strategies.size(), strategies);
  }
  for (std::size_t i = 0; i < strategies; ++i) {
    if (group.strategies[i].strategy != kMeasuredStrategies.at(i)) {
      return KVFERRY_ERROR(kProtocol, "calibration: strategy {} is {}, expected {}", i,
                           to_string(group.strategies[i].strategy),
                           to_string(kMeasuredStrategies.at(i)));
    }
    KVFERRY_TRY(check_figures(group.strategies[i].us, blocks.size(),
                              to_string(group.strategies[i].strategy)));
  }
  return ipc::ok();
}

/// "the driver is 'b', was 'a'".
void add_difference(std::string& all,
                    std::string_view what,
                    std::string_view now,
                    std::string_view then) {
  if (now == then) return;
  all += fmt::format("{}the {} is '{}', was '{}'", all.empty() ? "" : "; ", what, now, then);
}

}  // namespace

std::string difference(const CalibrationKey& now, const CalibrationKey& then) {
  std::string all;
  add_difference(all, "calibration's version", std::to_string(now.version),
                 std::to_string(then.version));
  add_difference(all, "device", now.device.name, then.device.name);
  add_difference(all, "device's uuid", now.device.uuid, then.device.uuid);
  add_difference(all, "device's link", now.device.link, then.device.link);
  add_difference(all, "driver", now.device.driver, then.device.driver);
  add_difference(all, "CUDA runtime", now.device.runtime, then.device.runtime);
  add_difference(all, "arena", ipc::to_string(now.order), ipc::to_string(then.order));
  add_difference(all, "geometry", now.fingerprint.hex(), then.fingerprint.hex());
  return all;
}

Status check_calibration(const Calibration& calibration) {
  const CalibrationKey& key = calibration.key;
  if (key.version != kCalibrationVersion) {
    return KVFERRY_ERROR(kVersionMismatch, "calibration of version {}, this is version {}",
                         key.version, kCalibrationVersion);
  }
  for (const std::string* text : {&key.device.name, &key.device.uuid, &key.device.link,
                                  &key.device.driver, &key.device.runtime}) {
    if (text->size() <= kLongestText) continue;
    return KVFERRY_ERROR(kProtocol, "calibration: a text of the device has {} bytes, at most {}",
                         text->size(), kLongestText);
  }
  if (ipc::to_string(key.order) == "invalid") {
    return KVFERRY_ERROR(kProtocol, "calibration: there is no arena order {}",
                         static_cast<unsigned>(key.order));
  }
  const std::size_t groups = calibration.to_host.size();
  if (groups == 0 || groups > ipc::kMaxGroups || calibration.to_device.size() != groups) {
    return KVFERRY_ERROR(kProtocol,
                         "calibration: {} groups to host and {} to device, expected as many, 1 to "
                         "{}",
                         groups, calibration.to_device.size(), ipc::kMaxGroups);
  }
  bool measured = false;
  for (std::size_t group = 0; group < groups; ++group) {
    for (const auto* way : {&calibration.to_host, &calibration.to_device}) {
      KVFERRY_TRY(check_group((*way)[group]));
      measured = measured || !(*way)[group].blocks.empty();
    }
  }
  if (measured) return ipc::ok();
  return KVFERRY_ERROR(kProtocol, "calibration: nothing was measured");
}

ipc::Result<CalibrationKey> calibration_key(const ipc::Device& device,
                                            const ipc::Geometry& geometry,
                                            ipc::ArenaOrder order) {
  CalibrationKey key;
  KVFERRY_ASSIGN(key.device, device.identity());
  key.order = order;
  key.fingerprint = geometry.fingerprint(order);
  return key;
}

}  // namespace kvferry::cache_manager
