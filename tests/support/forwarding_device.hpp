// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {

/// Another device, of which a test changes something.
class ForwardingDevice : public ipc::Device {
 public:
  explicit ForwardingDevice(std::unique_ptr<ipc::Device> real) : real_(std::move(real)) {}

  [[nodiscard]] const ipc::DeviceSpec& spec() const noexcept override { return real_->spec(); }
  [[nodiscard]] std::string name() const override { return real_->name(); }
  [[nodiscard]] ipc::Result<ipc::DeviceIdentity> identity() const override {
    return real_->identity();
  }
  [[nodiscard]] std::vector<int> numa_nodes() const override { return real_->numa_nodes(); }
  [[nodiscard]] ipc::Result<ipc::MemoryInfo> memory_info() override { return real_->memory_info(); }
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::AddressRange>> reserve(
      std::uint64_t size_bytes) override {
    return real_->reserve(size_bytes);
  }
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::DeviceMemory>> allocate(
      std::uint64_t size_bytes, ipc::HandleKind kind, ipc::AddressRange* at) override {
    return real_->allocate(size_bytes, kind, at);
  }
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::DeviceMemory>> import(
      ipc::ExportedHandle handle, ipc::AddressRange* at) override {
    return real_->import(std::move(handle), at);
  }
  [[nodiscard]] std::uint64_t allocation_granularity() const noexcept override {
    return real_->allocation_granularity();
  }
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::BorrowedMemory>> borrow(
      ipc::DevicePtr address) override {
    return real_->borrow(address);
  }
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::Stream>> make_stream(
      ipc::StreamPriority priority) override {
    return real_->make_stream(priority);
  }
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::RegionTable>> make_region_table(
      std::vector<kernels::StridedRegion> regions) override {
    return real_->make_region_table(std::move(regions));
  }
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::PinnedBuffer>> make_pinned_buffer(
      std::uint64_t size_bytes) override {
    return real_->make_pinned_buffer(size_bytes);
  }
  [[nodiscard]] ipc::Status register_host(void* data, std::uint64_t size_bytes) override {
    return real_->register_host(data, size_bytes);
  }
  [[nodiscard]] ipc::Status unregister_host(void* data) override {
    return real_->unregister_host(data);
  }

 private:
  std::unique_ptr<ipc::Device> real_;
};

}  // namespace kvferry::test
