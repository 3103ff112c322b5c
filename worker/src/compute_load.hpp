// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/worker/compute_load.hpp"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace kvferry::worker {

/// Runs a load on a stream of normal priority, round after round, each as soon as the last one has
/// been seen to end, from its making to its end. @lifetime the device outlives it.
class ComputeLoad final : public RunningLoad {
 public:
  using Failed = std::function<void(const ipc::Error&)>;

  /// failed: called once, on its thread, when a round fails or its file cannot be written.
  /// Throws Exception when the device has not what the load needs.
  ComputeLoad(ipc::Device& device, const ComputeLoadConfig& config, Failed failed);
  ComputeLoad(const ComputeLoad&) = delete;
  ComputeLoad& operator=(const ComputeLoad&) = delete;
  ~ComputeLoad() override;

 private:
  [[nodiscard]] ipc::Status prepare(ComputeLoadKind kind);
  [[nodiscard]] ipc::Status prepare_reads(ComputeLoadKind kind);
  [[nodiscard]] ipc::Status enqueue();
  void run();
  [[nodiscard]] ipc::Status round();
  [[nodiscard]] ipc::Status flush();

  ipc::Device& device_;
  const std::string times_file_;
  Failed failed_;
  std::unique_ptr<ipc::DeviceMemory> memory_;
  std::unique_ptr<ipc::MatrixProduct> product_;
  std::unique_ptr<ipc::RecordedWork> graph_;
  std::unique_ptr<ipc::Stream> stream_;  ///< After what its work uses.
  ipc::UniqueFd file_;
  std::vector<std::uint64_t> ends_;  ///< Not written yet.
  std::atomic<bool> stopping_{false};
  std::optional<ipc::OwnThread> thread_;  ///< Last: starts when all above exists.
};

}  // namespace kvferry::worker
