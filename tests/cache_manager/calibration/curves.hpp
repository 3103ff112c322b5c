// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/calibration.hpp"

#include <cstdint>
#include <utility>
#include <vector>

namespace kvferry::cache_manager::samples {

/// Microseconds of a job: a fixed part, and one for each block.
struct Cost {
  double fixed_us = 0;
  double us_per_block = 1;
  [[nodiscard]] double of(std::uint32_t blocks) const { return fixed_us + blocks * us_per_block; }
};

/// Costs of staged, strided, batch and memcpy.
inline GroupCurves curves(const std::vector<Cost>& costs, std::uint64_t block_bytes = 2ULL << 20) {
  GroupCurves group;
  group.block_bytes = block_bytes;
  group.regions = 64;
  group.blocks = {1, 4, 16, 32};
  for (const std::uint32_t blocks : group.blocks) group.large_us.push_back(38.0 * blocks);
  for (std::size_t i = 0; i < kMeasuredStrategies.size(); ++i) {
    StrategyCurve curve{kMeasuredStrategies.at(i), {}};
    for (const std::uint32_t blocks : group.blocks) curve.us.push_back(costs.at(i).of(blocks));
    group.strategies.push_back(std::move(curve));
  }
  return group;
}

inline CalibrationKey key() {
  CalibrationKey made;
  made.device = {"NVIDIA H200", "GPU-01234567-89ab-cdef-0123-456789abcdef",
                 "0000:3b:00.0, 32.0 GT/s PCIe x16", "580.159.03, CUDA 13.0", "13.0"};
  made.fingerprint = ipc::Digest::from_words(7, 9);
  return made;
}

/// As measured on an H200 with 64 chunks of 32 KiB a block.
inline Calibration h200() {
  Calibration made;
  made.key = key();
  made.to_host = {curves({{3, 38.3}, {2, 51}, {8, 66}, {20, 200}})};
  made.to_device = {curves({{3, 38.4}, {2, 49}, {8, 80}, {20, 220}})};
  return made;
}

}  // namespace kvferry::cache_manager::samples
