// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/host_allocations.hpp"
#include "device/host_ledger.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::ipc {

/// Addresses without memory: touching them faults. Shared by the AddressRange that the caller holds
/// and the memory mapped into it, so that neither can pull the addresses from under the other.
/// @threading any.
class HostReservation {
 public:
  [[nodiscard]] static Result<std::shared_ptr<HostReservation>> create(std::uint64_t size_bytes);
  HostReservation(std::uintptr_t address, std::uint64_t size_bytes) noexcept
      : address_(address), size_bytes_(size_bytes) {}
  HostReservation(const HostReservation&) = delete;
  HostReservation& operator=(const HostReservation&) = delete;
  ~HostReservation();

  /// Maps the object at the start. kInvalidArgument when it is too large, kBusy when something is
  /// mapped.
  [[nodiscard]] Status map(int fd, std::uint64_t size_bytes);
  /// Back to addresses that fault.
  [[nodiscard]] Status unmap();

  [[nodiscard]] std::uintptr_t address() const noexcept { return address_; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return size_bytes_; }

 private:
  std::uintptr_t address_;
  std::uint64_t size_bytes_;
  std::mutex mutex_;                ///< Guards mapped_bytes_ and the mapping.
  std::uint64_t mapped_bytes_ = 0;  ///< 0: nothing mapped.
};

class HostAddressRange final : public AddressRange {
 public:
  explicit HostAddressRange(std::shared_ptr<HostReservation> reservation) noexcept
      : reservation_(std::move(reservation)) {}
  [[nodiscard]] DevicePtr address() const noexcept override {
    return DevicePtr{reservation_->address()};
  }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override {
    return reservation_->size_bytes();
  }
  [[nodiscard]] const std::shared_ptr<HostReservation>& reservation() const noexcept {
    return reservation_;
  }

 private:
  std::shared_ptr<HostReservation> reservation_;
};

/// One mapping of one memory object, in a reservation or wherever the kernel puts it. Legacy
/// imports of one object share it: same pointer, counted.
class HostMapping {
 public:
  [[nodiscard]] static Result<std::shared_ptr<HostMapping>> create(
      int fd, std::uint64_t size_bytes, std::shared_ptr<HostReservation> at);
  HostMapping(std::uintptr_t address,
              std::uint64_t size_bytes,
              std::shared_ptr<HostReservation> at) noexcept
      : address_(address), size_bytes_(size_bytes), at_(std::move(at)) {}
  HostMapping(const HostMapping&) = delete;
  HostMapping& operator=(const HostMapping&) = delete;
  ~HostMapping();

  /// @pre nobody shares it. Harmless when unmapped already.
  [[nodiscard]] Status unmap();
  [[nodiscard]] std::uintptr_t address() const noexcept { return address_; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return size_bytes_; }

 private:
  std::uintptr_t address_;
  std::uint64_t size_bytes_;
  std::shared_ptr<HostReservation> at_;
  bool mapped_ = true;
};

/// Memory of a host device, allocated (holds a descriptor for export) or imported.
/// @threading one at a time.
class HostMemory final : public DeviceMemory {
 public:
  /// object: valid for allocated memory, invalid for imported.
  HostMemory(std::string device_name,
             HandleKind kind,
             std::shared_ptr<HostMapping> mapping,
             UniqueFd object);
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory() override;

  [[nodiscard]] DevicePtr address() const noexcept override { return DevicePtr{address_}; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override { return size_bytes_; }
  [[nodiscard]] HandleKind kind() const noexcept override { return kind_; }
  [[nodiscard]] Result<ExportedHandle> export_handle() override;
  [[nodiscard]] Result<std::vector<pid_t>> mapped_elsewhere() override;
  [[nodiscard]] std::unique_ptr<MemoryTrace> trace() const override;
  [[nodiscard]] Status release() override;

 private:
  std::string device_name_;
  HandleKind kind_;
  std::uintptr_t address_;
  std::uint64_t size_bytes_;
  std::shared_ptr<HostMapping> mapping_;  ///< Null once released.
  UniqueFd object_;
  std::shared_ptr<HostAllocations> allocations_;  ///< Null for imported memory.
};

}  // namespace kvferry::ipc
