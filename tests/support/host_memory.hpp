// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <chrono>
#include <cstdint>
#include <string_view>

namespace kvferry::test {

/// What is in use of a host device behind a death: while any process of the machine reads the
/// mappings of one that has died (/proc/PID/maps), the kernel keeps that one's memory for it. Looks
/// until it is what is expected, or for 20 s.
[[nodiscard]] inline std::uint64_t host_bytes_after_death(std::string_view device,
                                                          std::uint64_t expected) {
  const ipc::Deadline deadline = ipc::Deadline::after(std::chrono::seconds(20));
  std::uint64_t now = ipc::host_device_used_bytes(device).value();
  while (now != expected && !deadline.expired()) now = ipc::host_device_used_bytes(device).value();
  return now;
}

}  // namespace kvferry::test
