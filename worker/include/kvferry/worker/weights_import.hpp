// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace kvferry::worker {

/// A tensor that another process lends.
struct LentTensorInfo {
  std::string name;
  std::string dtype;
  std::vector<std::uint64_t> shape;
  std::uint64_t size_bytes = 0;
};

/// Tensors in device memory of another process (a WeightsExporter's): described, then mapped, then
/// given back. For a WeightsUser that is told to prepare from WeightsFrom::kIpc.
/// Nothing that the lender says is trusted: sizes, offsets and counts are checked before any use.
/// @threading one at a time. @lifetime the device outlives it. Work of this process on the mapped
/// memory was observed to end before give_back() or the destructor.
class WeightsImport {
 public:
  /// Asks for the description. kNotFound: nobody lends under that name; kPeerDied names the lender
  /// that died or closed; kProtocol for a description that cannot be; kCancelled when `cancelled`
  /// becomes true meanwhile.
  [[nodiscard]] static ipc::Result<WeightsImport> open(const std::filesystem::path& socket,
                                                       ipc::Deadline deadline,
                                                       const std::atomic<bool>& cancelled);
  WeightsImport(WeightsImport&&) noexcept;
  WeightsImport& operator=(WeightsImport&&) noexcept;
  ~WeightsImport();

  /// In the lender's order.
  [[nodiscard]] const std::vector<LentTensorInfo>& tensors() const noexcept;
  /// "exporter (pid N)".
  [[nodiscard]] std::string lender() const;
  /// Maps every allocation. An error leaves nothing mapped.
  [[nodiscard]] ipc::Status map(ipc::Device& device);
  /// Null for a tensor without bytes. @pre map() was ok.
  [[nodiscard]] ipc::DevicePtr address(std::size_t tensor) const;
  /// kPeerDied once the lender is dead: what was read of its memory is not to be used.
  [[nodiscard]] ipc::Status check_lender() const;
  /// Unmaps all and tells the lender, which has to have heard it: kPeerDied, kTimeout. The memory
  /// is unmapped in any case.
  [[nodiscard]] ipc::Status give_back(ipc::Deadline deadline);

 private:
  class Impl;
  explicit WeightsImport(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::worker
