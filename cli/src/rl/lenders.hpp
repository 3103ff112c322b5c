// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "rl/weights_files.hpp"
#include "run/children.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::cli {

/// Who lends the weights of an RL loop in device memory: a process for each version, and where the
/// ranks have several devices one for each version and rank, on that rank's device. Writes into the
/// versions where an update finds them.
[[nodiscard]] std::vector<LenderPlan> plan_lenders(std::vector<WeightsVersion>& weights,
                                                   const std::vector<ipc::DeviceSpec>& devices);
/// Of these, on the device that has most of them.
[[nodiscard]] std::uint64_t lenders_on_fullest(const std::vector<ipc::DeviceSpec>& devices);
/// Device memory that each takes for weights of about so many bytes.
[[nodiscard]] std::uint64_t lent_bytes(std::uint64_t weights_bytes, std::uint32_t ranks);

/// Those of the names under which nobody lends anything now.
[[nodiscard]] std::vector<std::string> missing_lenders(const ipc::RuntimeDir& dir,
                                                       const std::vector<std::string>& names);

}  // namespace kvferry::cli
