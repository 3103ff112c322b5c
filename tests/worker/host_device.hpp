// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>

namespace kvferry::test {

/// A name that no other test of this machine uses.
inline std::string unique_device_name() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string name = fmt::format("w-{}-{}", ::getpid(), test->name()).substr(0, 64);
  std::replace(name.begin(), name.end(), '/', '.');  // Of a test with parameters.
  return name;
}

inline std::unique_ptr<ipc::Device> open_host_device(std::uint64_t capacity_bytes) {
  ipc::DeviceSpec spec;
  spec.host_name = unique_device_name();
  spec.host_capacity_bytes = capacity_bytes;
  return ipc::open_device(spec);
}

/// Bytes of this test's device that are taken, as the kernel counts them.
inline std::uint64_t device_used_bytes() {
  return ipc::host_device_used_bytes(unique_device_name()).value();
}

}  // namespace kvferry::test
