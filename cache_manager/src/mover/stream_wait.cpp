// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/stream_wait.hpp"

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <poll.h>

#include <chrono>

namespace kvferry::cache_manager {
namespace {

// Between two questions to a stream that cannot notify.
constexpr std::chrono::milliseconds kIdleCheck{2};

}  // namespace

ipc::Error device_hangs(std::chrono::milliseconds patience) {
  return KVFERRY_ERROR(
      kTimeout,
      "copies have not ended and none has for {} ms: the device hangs; this process "
      "has to end",
      patience.count());
}

ipc::Status wait_stream(ipc::Stream& stream,
                        const ipc::EventFd& done,
                        std::chrono::milliseconds patience) {
  done.drain();
  if (const ipc::Status notified = stream.notify(done.fd()); !notified) {
    // What was enqueued before still runs: its memory may not be given on before it has ended.
    KVFERRY_TRY(wait_stream_idle(stream, patience));
    return notified.error();
  }
  // Looks are counted, not time: after a stop of this process the device gets all of it again.
  for (auto looked = std::chrono::milliseconds::zero(); looked < patience;) {
    pollfd waited{done.fd(), POLLIN, 0};
    // wait: own copies; kDeviceCheck, together patience (kDeviceHang), then this process ends; the
    // device's failure
    const int ready = ::poll(&waited, 1, ipc::Deadline::after(kDeviceCheck).poll_timeout_ms());
    if (ready > 0) {
      done.drain();
      // A copy that failed shows here; and memory is ordered by the stream, not by the eventfd.
      KVFERRY_TRY(stream.query());
      return ipc::ok();
    }
    KVFERRY_ASSIGN(const bool idle, stream.query());
    if (idle && done.drain()) return ipc::ok();
    if (ready == 0) looked += kDeviceCheck;
  }
  return device_hangs(patience);
}

ipc::Status wait_stream_idle(ipc::Stream& stream, std::chrono::milliseconds patience) {
  ipc::log_warn("a stream does not notify; asking it until its copies have ended, at most {} ms",
                patience.count());
  for (auto looked = std::chrono::milliseconds::zero(); looked < patience; looked += kIdleCheck) {
    KVFERRY_ASSIGN(const bool idle, stream.query());
    if (idle) {
      ipc::log_info("the stream that does not notify is idle");
      return ipc::ok();
    }
    // wait: own copies of a stream that cannot notify; kIdleCheck, together patience (kDeviceHang),
    // then this process ends; the device's failure
    ::poll(nullptr, 0, ipc::Deadline::after(kIdleCheck).poll_timeout_ms());
  }
  return device_hangs(patience);
}

}  // namespace kvferry::cache_manager
