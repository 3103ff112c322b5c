// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvferry::worker {

/// A tensor in device memory of this process, row-major and without gaps. The allocation that it
/// lies in can be shared: what Device::borrow() takes.
struct ExportedTensor {
  std::string name;
  std::string dtype;  ///< As in safetensors files: "BF16", "F32", "U8" and so on.
  std::vector<std::uint64_t> shape;
  ipc::DevicePtr address;  ///< Of no consequence when the tensor has no bytes.
};

struct ExporterOptions {
  std::string runtime_dir;  ///< Empty: the default (RuntimeDir).
  std::string instance = "default";
  std::string name;  ///< The source of `kvferry update-weights --from ipc`, see RuntimeDir.
};

/// Lends tensors to the workers of an instance, which copy them from device to device: for a
/// trainer beside its engine. A worker maps the memory while it prepares an update, and has let go
/// when that update is answered; who maps it is known to this object.
/// @threading any; borrowers are served on a thread of its own. @lifetime the device outlives it,
/// and the memory stays as it is, address and contents, until close() is ok.
class WeightsExporter {
 public:
  /// kAlreadyExists for a name that a living process has, kInvalidArgument for a tensor that cannot
  /// be lent: the message names it.
  [[nodiscard]] static ipc::Result<std::unique_ptr<WeightsExporter>> start(
      ipc::Device& device, ExporterOptions options, std::vector<ExportedTensor> tensors);
  WeightsExporter(const WeightsExporter&) = delete;
  WeightsExporter& operator=(const WeightsExporter&) = delete;
  /// Lends nothing more; memory that is still lent is not waited for.
  ~WeightsExporter();

  /// Processes that may have the memory mapped now.
  [[nodiscard]] std::size_t borrowers() const;
  /// Lends nothing more, and waits until nobody has the memory mapped: then it may be freed.
  /// kTimeout names the processes that still do. Again: waits for them again.
  [[nodiscard]] ipc::Status close(ipc::Deadline deadline);

 private:
  class Impl;
  explicit WeightsExporter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::worker
