// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Stands in for the CUDA backend in a build without it.
#include "device/cuda_device.hpp"

#include <fmt/format.h>

namespace kvferry::ipc {

std::unique_ptr<Device> make_cuda_device(const DeviceSpec& spec) {
  throw Exception(KVFERRY_ERROR(kInvalidArgument,
                                "device {}: this build has no CUDA backend; build with "
                                "-DKVFERRY_CUDA=ON (CUDA toolkit 12.8 or newer) or name a host "
                                "device such as host:demo-0:2GiB",
                                spec.to_string()));
}

int cuda_device_count() noexcept { return 0; }

}  // namespace kvferry::ipc
