// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"

#include <string_view>

namespace kvferry::ipc {

/// Waits until all work of the stream has ended. done: has been given to Stream::notify() behind
/// that work. kTimeout names what; the device's own error when it failed.
[[nodiscard]] Status await_stream(Stream& stream,
                                  EventFd& done,
                                  Deadline deadline,
                                  std::string_view what);

}  // namespace kvferry::ipc
