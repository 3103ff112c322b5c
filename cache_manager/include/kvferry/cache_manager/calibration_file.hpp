// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/calibration.hpp"

#include <filesystem>
#include <string>
#include <string_view>

/// Calibrations that outlive their process.
namespace kvferry::cache_manager {

/// The file of a key in a cache directory: one for each device and geometry, whatever their
/// versions.
[[nodiscard]] std::filesystem::path calibration_file(const std::filesystem::path& cache_dir,
                                                     const CalibrationKey& key);
/// JSON.
[[nodiscard]] std::string to_text(const Calibration& calibration);
/// kVersionMismatch for another kCalibrationVersion, kProtocol for everything else that to_text()
/// does not write.
[[nodiscard]] ipc::Result<Calibration> parse_calibration(std::string_view text);
/// What is kept for the key. kNotFound: nothing; kStaleEpoch: for another one, the message says
/// what differs; as parse_calibration() and read_cache_file() else.
[[nodiscard]] ipc::Result<Calibration> load_calibration(const std::filesystem::path& file,
                                                        const CalibrationKey& key);
[[nodiscard]] ipc::Status save_calibration(const std::filesystem::path& file,
                                           const Calibration& calibration);

}  // namespace kvferry::cache_manager
