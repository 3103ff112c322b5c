// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "await_stream.hpp"

#include <poll.h>

namespace kvferry::worker {

using std::chrono_literals::operator""ms;

ipc::Status await_stream(ipc::Stream& stream,
                         ipc::EventFd& done,
                         ipc::Deadline deadline,
                         std::string_view what) {
  while (true) {
    KVFERRY_ASSIGN(const bool ended, stream.query());
    if (ended) return ipc::ok();
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "{} did not end; the device may hang", what);
    }
    // A device that failed never signals: it is looked at.
    pollfd entry{done.fd(), POLLIN, 0};
    // wait: own work on the device; deadline, of the caller, in steps of 100 ms; the device's
    // failure
    ::poll(&entry, 1, ipc::Deadline::after(100ms).earlier(deadline).poll_timeout_ms());
    done.drain();
  }
}

}  // namespace kvferry::worker
