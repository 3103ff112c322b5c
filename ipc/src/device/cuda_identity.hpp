// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"

namespace kvferry::ipc {

[[nodiscard]] Result<DeviceIdentity> cuda_identity(int ordinal);
/// Its slot, as /sys names it: "0000:3b:00.0".
[[nodiscard]] Result<std::string> cuda_bus_id(int ordinal);

}  // namespace kvferry::ipc
