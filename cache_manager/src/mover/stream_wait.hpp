// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"

namespace kvferry::cache_manager {

/// Waits until the stream is done with everything enqueued so far. Bounded by the device, which
/// either gets there or reports a failure; one that hangs is the business of quiesce's deadline,
/// which ends this process.
/// @pre nothing else is notified to this eventfd.
[[nodiscard]] ipc::Status wait_stream(ipc::Stream& stream, const ipc::EventFd& done);

/// Same for a stream that refused to notify: it is asked again and again.
[[nodiscard]] ipc::Status wait_stream_idle(ipc::Stream& stream);

}  // namespace kvferry::cache_manager
