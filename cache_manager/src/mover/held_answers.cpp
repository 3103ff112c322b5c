// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/held_answers.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kRound{1000};
constexpr milliseconds kFirstBackoff{10};
constexpr milliseconds kLongestBackoff{1000};
// A proof that takes longer is worth a warning, and another one each time it has doubled.
constexpr milliseconds kLate{3000};

milliseconds age(ipc::TimePoint since) {
  return std::chrono::duration_cast<milliseconds>(ipc::MonotonicClock::now() - since);
}

}  // namespace

void HeldAnswers::add(ipc::MoverJobDone done) {
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  ipc::log_info("job {}: waits for the proof that worker (pid {}) has ended what it was asked: {}",
                done.job.value, staging_.agent().pid(), done.message);
  if (held_.empty()) {
    backoff_ = kFirstBackoff;
    next_report_ = now + kLate;
  }
  held_.push_back({std::move(done), now});
}

void HeldAnswers::pursue(int wake_fd) {
  const ipc::Status greeted = staging_.ensure_connected(ipc::Deadline::after(kRound), wake_fd);
  release_if_proven();
  if (held_.empty()) return;
  report_if_late();
  const bool waits = !greeted && (greeted.error().code == ipc::ErrorCode::kTimeout ||
                                  greeted.error().code == ipc::ErrorCode::kCancelled);
  if (waits) return;
  if (!greeted) ipc::log_debug("staging is not proven over: {}", greeted.error().to_string());
  wait_before_retry(wake_fd);
}

// Nobody listens, or this mover is refused: what is left is the worker's death.
void HeldAnswers::wait_before_retry(int wake_fd) {
  std::array<pollfd, 2> waited{{{staging_.agent().pidfd(), POLLIN, 0}, {wake_fd, POLLIN, 0}}};
  // wait: the worker to listen again, or to end; backoff_, at most kLongestBackoff; its pidfd, new
  // work of the lane
  ::poll(waited.data(), waited.size(), ipc::Deadline::after(backoff_).poll_timeout_ms());
  backoff_ = std::min(backoff_ * 2, kLongestBackoff);
  release_if_proven();
}

void HeldAnswers::report_if_late() {
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  if (now < next_report_) return;
  const milliseconds waited = age(held_.front().since);
  ipc::log_warn(
      "{} jobs wait for worker (pid {}) since {} ms: it lives and has not shown that what it was "
      "asked has ended; their blocks stay taken until it does, or ends",
      held_.size(), staging_.agent().pid(), waited.count());
  next_report_ = now + waited;
}

void HeldAnswers::release_if_proven() {
  if (held_.empty() || staging_.in_debt()) return;
  for (Held& held : std::exchange(held_, {})) {
    ipc::log_info(
        "job {}: proven after {} ms: nothing that worker (pid {}) was asked runs any more",
        held.done.job.value, age(held.since).count(), staging_.agent().pid());
    answer_(std::move(held.done));
  }
}

}  // namespace kvferry::cache_manager
