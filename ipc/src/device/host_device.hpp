// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/host_ledger.hpp"
#include "device/host_memory.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace kvferry::ipc {

/// A simulated device: its memory is shared memory of this machine, its streams are threads.
class HostDevice final : public Device {
 public:
  /// Throws Exception. @pre spec was validated.
  explicit HostDevice(const DeviceSpec& spec);

  [[nodiscard]] const DeviceSpec& spec() const noexcept override { return spec_; }
  [[nodiscard]] std::string name() const override;
  [[nodiscard]] Result<DeviceIdentity> identity() const override;
  [[nodiscard]] Result<MemoryInfo> memory_info() override { return ledger_.memory_info(); }
  [[nodiscard]] Result<std::unique_ptr<AddressRange>> reserve(std::uint64_t size_bytes) override;
  [[nodiscard]] Result<std::unique_ptr<DeviceMemory>> allocate(std::uint64_t size_bytes,
                                                               HandleKind kind,
                                                               AddressRange* at) override;
  [[nodiscard]] Result<std::unique_ptr<DeviceMemory>> import(ExportedHandle handle,
                                                             AddressRange* at) override;
  [[nodiscard]] std::uint64_t allocation_granularity() const noexcept override;
  [[nodiscard]] Result<std::unique_ptr<BorrowedMemory>> borrow(DevicePtr address) override;
  [[nodiscard]] Result<std::unique_ptr<Stream>> make_stream(StreamPriority priority) override;
  [[nodiscard]] Result<std::unique_ptr<RegionTable>> make_region_table(
      std::vector<kernels::StridedRegion> regions) override;
  [[nodiscard]] Result<std::unique_ptr<PinnedBuffer>> make_pinned_buffer(
      std::uint64_t size_bytes) override;
  [[nodiscard]] Status register_host(void* data, std::uint64_t size_bytes) override;
  [[nodiscard]] Status unregister_host(void* data) override;
  [[nodiscard]] Result<BroadcastPort> broadcast_port() override;
  [[nodiscard]] Result<std::unique_ptr<BroadcastRoot>> open_broadcast() override;
  [[nodiscard]] Result<std::unique_ptr<BroadcastGroup>> join_broadcast(
      const BroadcastSeat& seat, const BroadcastWait& wait) override;

 private:
  /// The reservation behind `at`, null for none.
  [[nodiscard]] Result<std::shared_ptr<HostReservation>> target_of(AddressRange* at,
                                                                   HandleKind kind) const;
  /// Legacy: the mapping that this process has of the object, or a new one.
  [[nodiscard]] Result<std::shared_ptr<HostMapping>> map_import(
      const ExportedHandle& handle, std::shared_ptr<HostReservation> target);

  DeviceSpec spec_;
  HostLedger ledger_;
  std::mutex mutex_;  ///< Guards both maps.
  std::map<ObjectId, std::weak_ptr<HostMapping>> legacy_imports_;
  std::map<std::uintptr_t, std::uint64_t> registered_;  ///< Start to size.
};

}  // namespace kvferry::ipc
