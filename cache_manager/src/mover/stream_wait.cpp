// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/stream_wait.hpp"

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <poll.h>

#include <chrono>

namespace kvferry::cache_manager {
namespace {

// How often a wait looks at the device although nothing woke it: a failed device wakes nobody.
constexpr auto kDeviceCheck = std::chrono::milliseconds(250);
// Between two questions to a stream that cannot notify.
constexpr auto kIdleCheck = std::chrono::milliseconds(2);

}  // namespace

ipc::Status wait_stream(ipc::Stream& stream, const ipc::EventFd& done) {
  done.drain();
  if (const ipc::Status notified = stream.notify(done.fd()); !notified) {
    // What was enqueued before still runs: its memory may not be given on before it has ended.
    KVFERRY_TRY(wait_stream_idle(stream));
    return notified.error();
  }
  for (;;) {
    pollfd waited{done.fd(), POLLIN, 0};
    const int ready = ::poll(&waited, 1, ipc::Deadline::after(kDeviceCheck).poll_timeout_ms());
    if (ready > 0) {
      done.drain();
      // A copy that failed shows here; and memory is ordered by the stream, not by the eventfd.
      KVFERRY_TRY(stream.query());
      return ipc::ok();
    }
    KVFERRY_ASSIGN(const bool idle, stream.query());
    if (idle && done.drain()) return ipc::ok();
  }
}

ipc::Status wait_stream_idle(ipc::Stream& stream) {
  ipc::log_warn("a stream does not notify; asking it until its copies have ended");
  for (;;) {
    KVFERRY_ASSIGN(const bool idle, stream.query());
    if (idle) break;
    ::poll(nullptr, 0, ipc::Deadline::after(kIdleCheck).poll_timeout_ms());
  }
  ipc::log_info("the stream that does not notify is idle");
  return ipc::ok();
}

}  // namespace kvferry::cache_manager
