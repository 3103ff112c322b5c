// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "reconnector.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/name_watch.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <utility>

namespace kvferry::worker {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

namespace {
constexpr ipc::Duration kFirstPause = 10ms;
constexpr ipc::Duration kLongestPause = 500ms;
constexpr ipc::Duration kAttempt = 2s;

enum class Woken : std::uint8_t { kTime, kAppeared, kCancelled };

/// Until the time has passed, the watched name has appeared or the other end is not wanted any
/// more.
Woken wait_for_name(const ipc::EventFd& cancelled,
                    std::optional<ipc::NameWatch>& watch,
                    ipc::Duration length) {
  const ipc::Deadline deadline = ipc::Deadline::after(length);
  while (true) {
    std::array<pollfd, 2> entries{pollfd{cancelled.fd(), POLLIN, 0},
                                  pollfd{watch ? watch->fd() : -1, POLLIN, 0}};
    // wait: a manager to come, nothing is owed; deadline (length, at most kLongestPause); its name,
    // the end of this object
    const int ready = ::poll(entries.data(), entries.size(), deadline.poll_timeout_ms());
    if (ready > 0 && entries[0].revents != 0) return Woken::kCancelled;
    if (ready > 0 && watch) {
      const bool appeared = watch->drain();
      if (watch->is_over()) watch.reset();
      if (appeared) return Woken::kAppeared;
    }
    if (deadline.expired()) return Woken::kTime;
  }
}
}  // namespace

Reconnector::Reconnector(ipc::ControlLink::Options options, ipc::Duration after)
    : options_(std::move(options)) {
  thread_.emplace("kvf-reconnect", ipc::OwnThread::Runs::kOurCode, [this, after] { run(after); });
}

Reconnector::~Reconnector() {
  cancelled_.signal();
  // wait: its own thread; wait_end() gives it kEndsWithin; its attempt ends within kAttempt
  thread_->wait_end();
}

std::unique_ptr<ipc::ControlLink> Reconnector::take() {
  const std::lock_guard lock(mutex_);
  connected_.drain();
  return std::move(link_);
}

void Reconnector::run(ipc::Duration wait) {
  ipc::Duration next = kFirstPause;
  std::optional<ipc::NameWatch> watch;
  while (true) {
    if (!watch) {
      // Before the attempt: a manager that comes between attempt and watch would be missed.
      if (auto opened = ipc::NameWatch::open(options_.registry_path)) watch = *std::move(opened);
    }
    const Woken woken = wait_for_name(cancelled_, watch, wait);
    if (woken == Woken::kCancelled) return;
    if (woken == Woken::kAppeared) next = kFirstPause;
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
