// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/strategy_choice.hpp"

#include <nlohmann/json_fwd.hpp>

#include <filesystem>
#include <string>
#include <vector>

namespace kvferry::cli {

/// A geometry on a device, and what is known of its copies.
struct CalibratedGeometry {
  std::string geometry;
  cache_manager::Calibration calibration;
  std::vector<cache_manager::CopyStrategy> possible;
  cache_manager::StagingSlots slots;
  /// What movers would take if nothing had been measured.
  cache_manager::CopyStrategy rule = cache_manager::CopyStrategy::kBatch;
  std::filesystem::path file;  ///< Empty: not kept.
  double seconds = 0;          ///< Of measuring now; 0: it was kept.
};

[[nodiscard]] nlohmann::json to_json(const CalibratedGeometry& calibrated);
[[nodiscard]] std::string table_of(const CalibratedGeometry& calibrated);

}  // namespace kvferry::cli
