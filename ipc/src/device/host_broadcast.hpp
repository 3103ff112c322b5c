// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <memory>

namespace kvferry::ipc {

/// Broadcasts between simulated devices, whose processes are connected by sockets of this machine.
inline constexpr const char* kHostTransport = "host";

[[nodiscard]] Result<std::unique_ptr<BroadcastRoot>> open_host_broadcast();
[[nodiscard]] Result<std::unique_ptr<BroadcastGroup>> join_host_broadcast(
    const BroadcastSeat& seat, const BroadcastWait& wait);

}  // namespace kvferry::ipc
