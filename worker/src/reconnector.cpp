// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "reconnector.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <utility>

namespace kvferry::worker {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

namespace {
constexpr ipc::Duration kFirstPause = 10ms;
constexpr ipc::Duration kLongestPause = 500ms;
constexpr ipc::Duration kAttempt = 2s;

/// True when cancelled.
bool pause(const ipc::EventFd& cancelled, ipc::Duration length) {
  pollfd entry{cancelled.fd(), POLLIN, 0};
  return ::poll(&entry, 1, ipc::Deadline::after(length).poll_timeout_ms()) > 0;
}
}  // namespace

Reconnector::Reconnector(ipc::ControlLink::Options options, ipc::Duration after)
    : options_(std::move(options)) {
  // The engine's signals are the engine's: none is delivered to this thread.
  sigset_t all{};
  sigset_t before{};
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this, after] { run(after); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Reconnector::~Reconnector() {
  cancelled_.signal();
  thread_.join();
}

std::unique_ptr<ipc::ControlLink> Reconnector::take() {
  const std::lock_guard lock(mutex_);
  connected_.drain();
  return std::move(link_);
}

void Reconnector::run(ipc::Duration wait) {
  ipc::Duration next = kFirstPause;
  while (!pause(cancelled_, wait)) {
    auto link = ipc::ControlLink::connect(options_, ipc::Deadline::after(kAttempt));
    if (link) {
      const std::lock_guard lock(mutex_);
      link_ = std::move(link).value();
      connected_.signal();
      return;
    }
    ipc::log_debug("client: no manager yet: {}", link.error().to_string());
    wait = next;
    next = std::min(next * 2, kLongestPause);
  }
}

}  // namespace kvferry::worker
