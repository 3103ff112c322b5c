// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"

namespace kvferry::ipc {

[[nodiscard]] Result<DeviceIdentity> cuda_identity(int ordinal);

}  // namespace kvferry::ipc
