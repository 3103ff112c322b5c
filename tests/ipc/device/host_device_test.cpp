// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/device/device.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace kvferry::ipc {
namespace {

constexpr std::uint64_t kMiB = 1ULL << 20;

/// Every test has a device of its own, so that tests of one machine cannot disturb each other.
class HostDeviceTest : public ::testing::Test {
 protected:
  static std::string device_name(std::string_view suffix = "") {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    return fmt::format("t-{}-{}{}", ::getpid(), test->name(), suffix).substr(0, 64);
  }
  static std::unique_ptr<Device> open(std::uint64_t capacity, std::string_view suffix = "") {
    DeviceSpec spec;
    spec.host_name = device_name(suffix);
    spec.host_capacity_bytes = capacity;
    return open_device(spec);
  }
  static std::uint64_t used() { return host_device_used_bytes(device_name()).value(); }
  static std::unique_ptr<DeviceMemory> allocate(Device& device,
                                                std::uint64_t size,
                                                HandleKind kind = HandleKind::kVmm,
                                                AddressRange* at = nullptr) {
    auto memory = device.allocate(size, kind, at);
    EXPECT_TRUE(memory.has_value()) << memory.error().to_string();
    return std::move(memory).value();
  }
};

TEST_F(HostDeviceTest, CountsExactlyWhatIsAllocated) {
  const auto device = open(64 * kMiB);
  EXPECT_EQ(device->name(), "host device " + device_name());
  EXPECT_EQ(device->memory_info()->total_bytes, 64 * kMiB);
  EXPECT_EQ(device->memory_info()->free_bytes, 64 * kMiB);
  auto first = allocate(*device, 5 * kMiB + 1);
  EXPECT_EQ(first->size_bytes(), 6 * kMiB);
  auto second = allocate(*device, 2 * kMiB, HandleKind::kLegacy);
  EXPECT_EQ(used(), 8 * kMiB);
  EXPECT_EQ(device->memory_info()->free_bytes, 56 * kMiB);
  EXPECT_TRUE(first->release().has_value());
  EXPECT_TRUE(first->release().has_value());
  EXPECT_EQ(used(), 2 * kMiB);
  second.reset();
  EXPECT_EQ(used(), 0U);
}

}  // namespace
}  // namespace kvferry::ipc
