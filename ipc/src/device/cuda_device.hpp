// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <memory>

namespace kvferry::ipc {

/// The CUDA part of open_device(). @pre spec.kind is kCuda. Throws Exception.
[[nodiscard]] std::unique_ptr<Device> make_cuda_device(const DeviceSpec& spec);

}  // namespace kvferry::ipc
