// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/device/await_stream.hpp"

#include <poll.h>

namespace kvferry::ipc {

using std::chrono_literals::operator""ms;

Status await_stream(Stream& stream, EventFd& done, Deadline deadline, std::string_view what) {
  // A GPU's stream ends a moment behind the signal, which does not come again.
  auto look = 100ms;
  while (true) {
    KVFERRY_ASSIGN(const bool ended, stream.query());
    if (ended) return ok();
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "{} did not end; the device may hang", what);
    }
    // A device that failed never signals: it is looked at.
    pollfd entry{done.fd(), POLLIN, 0};
    // wait: own work on the device; deadline, of the caller, in steps of at most 100 ms; the
    // device's failure
    ::poll(&entry, 1, Deadline::after(look).earlier(deadline).poll_timeout_ms());
    if (done.drain()) look = 1ms;
  }
}

}  // namespace kvferry::ipc
