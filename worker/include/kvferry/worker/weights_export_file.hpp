// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/worker/weights_exporter.hpp"

#include <chrono>
#include <functional>
#include <string>

namespace kvferry::worker {

struct WeightsExportConfig {
  ExporterOptions lend;
  std::string file;  ///< Safetensors.
  ipc::DeviceSpec device;
  ipc::HandleKind handles = ipc::HandleKind::kVmm;
  /// How long borrowers may take to let go at the end.
  std::chrono::milliseconds return_deadline{15000};
};

/// Loads a file's tensors into device memory and lends them until SIGTERM, SIGINT or SIGHUP, then
/// waits until nobody has them mapped and frees them. ready: called once they are lent. Throws
/// Exception; kTimeout when somebody still has them mapped: their memory then goes with this
/// process.
void run_weights_export(const WeightsExportConfig& config, const std::function<void()>& ready);

}  // namespace kvferry::worker
