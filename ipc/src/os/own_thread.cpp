// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/own_thread.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <fmt/format.h>
#include <pthread.h>

#include <array>
#include <csignal>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr auto kNoticeable = std::chrono::seconds(1);

/// All signals that another thread may take as well; those that tell of a fault of the thread
/// itself stay.
sigset_t signals_of_others() {
  sigset_t signals{};
  ::sigfillset(&signals);
  for (const int number : std::array{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
    ::sigdelset(&signals, number);
  }
  return signals;
}

std::int64_t ms_since(TimePoint start) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(MonotonicClock::now() - start)
      .count();
}

}  // namespace

OwnThread::OwnThread(std::string name, Runs runs, std::function<void()> body)
    : name_(std::move(name)), runs_(runs) {
  // Before the thread exists: it inherits the mask.
  const sigset_t blocked = signals_of_others();
  sigset_t before{};
  ::pthread_sigmask(SIG_BLOCK, &blocked, &before);
  try {
    // wait-none: it begins here
    thread_ = std::thread([this, body = std::move(body)] {
      ::pthread_setname_np(::pthread_self(), name_.c_str());
      body();
      const std::lock_guard lock(mutex_);
      ended_ = true;
      changed_.notify_all();
    });
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void OwnThread::wait_end(Duration ends_within) {
  if (!thread_.joinable()) return;
  if (!home_.is_here()) {
    thread_.detach();
    return;
  }
  await_body(ends_within);
  // wait-brief: the thread's last instructions; it waits for nothing any more
  thread_.join();
}

bool OwnThread::has_ended(std::unique_lock<std::mutex>& lock) {
  const Deadline look = Deadline::after(kNoticeable);
  // wait: a thread that was told to end; look (kNoticeable), together kEndsWithin, then this
  // process ends, or says so and goes on where an engine's code runs; its end
  return changed_.wait_until(lock, look.when(), [this] { return ended_; });
}

void OwnThread::await_body(Duration ends_within) {
  const TimePoint start = MonotonicClock::now();
  std::unique_lock lock(mutex_);
  // Looks are counted, not time: after a stop of this process the thread gets all of it again.
  bool noticed = false;
  for (Duration looked{}; !has_ended(lock); looked += kNoticeable) {
    if (!std::exchange(noticed, true)) {
      log_info("waits for thread {} to end, at most {} ms", name_,
               ends_within / std::chrono::milliseconds(1));
    }
    if (looked + kNoticeable < ends_within) continue;
    KVFERRY_CHECK(
        runs_ == Runs::kEngineCode,
        fmt::format("thread {} does not end, {} ms after it was told to", name_, ms_since(start)));
    log_error(
        "thread {} does not end, {} ms after it was told to; look for a callback of the engine "
        "that does not return",
        name_, ms_since(start));
    looked = -Duration(kNoticeable);  // zero at the next look
  }
  if (noticed) log_info("thread {} ended after {} ms", name_, ms_since(start));
}

}  // namespace kvferry::ipc
