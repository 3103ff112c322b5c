// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry::ipc {

inline constexpr std::uint64_t kMiB = 1ULL << 20;

/// Every test has a host device of its own, so that tests of one machine do not meet.
class HostDeviceFixture : public ::testing::Test {
 protected:
  static std::string device_name(std::string_view suffix = "") {
    const std::string test = ::testing::UnitTest::GetInstance()->current_test_info()->name();
    return fmt::format("t{}{}-{}", ::getpid(), suffix, test).substr(0, 64);
  }
  static DeviceSpec spec(std::uint64_t capacity, std::string_view suffix = "") {
    DeviceSpec out;
    out.host_name = device_name(suffix);
    out.host_capacity_bytes = capacity;
    return out;
  }
  static std::unique_ptr<Device> open(std::uint64_t capacity, std::string_view suffix = "") {
    return open_device(spec(capacity, suffix));
  }
  static std::uint64_t used() { return host_device_used_bytes(device_name()).value(); }
  static std::unique_ptr<DeviceMemory> allocate(Device& device,
                                                std::uint64_t size,
                                                HandleKind kind = HandleKind::kVmm,
                                                AddressRange* at = nullptr) {
    return device.allocate(size, kind, at).value();
  }
  static unsigned char* bytes(const DeviceMemory& memory) {
    return static_cast<unsigned char*>(memory.address().raw());
  }
};

}  // namespace kvferry::ipc
