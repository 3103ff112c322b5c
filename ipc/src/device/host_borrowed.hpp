// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <memory>
#include <string>

namespace kvferry::ipc {

/// The host device's Device::borrow().
[[nodiscard]] Result<std::unique_ptr<BorrowedMemory>> borrow_host_memory(
    const std::string& device_name, DevicePtr address);

}  // namespace kvferry::ipc
