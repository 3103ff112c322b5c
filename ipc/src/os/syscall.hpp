// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"

#include <poll.h>

#include <cerrno>

namespace kvferry::ipc {

/// Repeats a system call for as long as a signal interrupts it. Not for close().
template <typename Call> auto retry_interrupted(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

/// poll(2) of one descriptor, restarted after signals: its revents, 0 at the deadline, -1 with
/// errno set.
inline int poll_until(int fd, short events, Deadline deadline) noexcept {
  for (;;) {
    pollfd entry{fd, events, 0};
    // wait: one descriptor; deadline, of the caller; its end
    const int ready = ::poll(&entry, 1, deadline.poll_timeout_ms());
    if (ready > 0) return entry.revents;
    if (ready == 0 && deadline.expired()) return 0;
    if (ready < 0 && errno != EINTR) return -1;
  }
}

/// What poll(2) says right now.
inline int poll_now(int fd, short events) noexcept {
  // wait-none: looks only
  return poll_until(fd, events, Deadline::at(TimePoint{}));
}

}  // namespace kvferry::ipc
