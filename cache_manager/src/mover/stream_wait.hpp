// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"

#include <chrono>

namespace kvferry::cache_manager {

/// How long a device may show no progress: a thousand times what its largest copy takes. Time in
/// which this process was stopped does not count.
inline constexpr std::chrono::milliseconds kDeviceHang{30'000};
/// How often a wait looks at the device although nothing woke it: a failed device wakes nobody.
inline constexpr std::chrono::milliseconds kDeviceCheck{250};

/// Waits until the stream is done with everything enqueued so far. kTimeout when it has not got
/// there after its patience, rounded up to kDeviceCheck: the device hangs, what was enqueued may
/// still write at any time, and only the end of this process gives its memory back.
/// @pre nothing else is notified to this eventfd.
[[nodiscard]] ipc::Status wait_stream(ipc::Stream& stream,
                                      const ipc::EventFd& done,
                                      std::chrono::milliseconds patience = kDeviceHang);

/// Same for a stream that refused to notify: it is asked again and again.
[[nodiscard]] ipc::Status wait_stream_idle(ipc::Stream& stream,
                                           std::chrono::milliseconds patience = kDeviceHang);

[[nodiscard]] ipc::Error device_hangs(std::chrono::milliseconds patience);

}  // namespace kvferry::cache_manager
