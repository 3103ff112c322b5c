// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_context.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <memory>

namespace kvferry::ipc {

/// Broadcasts between GPUs, by NCCL.
[[nodiscard]] Result<BroadcastPort> cuda_broadcast_port(const CudaContext& context);
[[nodiscard]] Result<std::unique_ptr<BroadcastRoot>> open_cuda_broadcast(ContextPtr context);
[[nodiscard]] Result<std::unique_ptr<BroadcastGroup>> join_cuda_broadcast(
    ContextPtr context, const BroadcastSeat& seat, const BroadcastWait& wait);

}  // namespace kvferry::ipc
