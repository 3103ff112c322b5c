// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <cstdint>
#include <functional>
#include <memory>

namespace kvferry::ipc {

/// A counter that wakes poll(2). @threading signal() from any thread or process; async-signal-safe.
class EventFd {
 public:
  EventFd();  ///< Throws Exception.
  void signal() const noexcept;
  /// Resets to zero; true when it had been signalled.
  // NOLINTNEXTLINE(modernize-use-nodiscard): often called for its effect alone
  bool drain() const noexcept;
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  UniqueFd fd_;
};

using TimerId = std::uint64_t;

/// Descriptors, timers and posted calls on one thread (epoll). Callbacks may add and remove
/// watches and timers, their own included; an exception from one is logged and ends run().
/// @threading all calls from the loop's thread, except post() and stop().
class EventLoop {
 public:
  using Callback = std::function<void()>;

  EventLoop();  ///< Throws Exception.
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;
  ~EventLoop();

  /// Calls back whenever fd is readable (level-triggered). The fd must outlive the watch, and has
  /// one at a time. Throws Exception when the kernel refuses (no memory, not a pollable file).
  void watch(int fd, Callback on_readable);
  void unwatch(int fd);
  TimerId at(TimePoint when, Callback callback);
  TimerId after(Duration delay, Callback callback) {
    return at(MonotonicClock::now() + delay, std::move(callback));
  }
  void cancel(TimerId timer);
  /// Runs the callback on the loop's thread; before the next poll.
  void post(Callback callback);

  /// For so long from now the loop looks for events again and again before it sleeps: what comes
  /// then is seen within a microsecond or two instead of ten. For who expects an answer soon: it
  /// takes a processor meanwhile, though others may run on it. Nothing where this process had fewer
  /// than 8 of them when the loop was made.
  void stay_awake(Duration time) noexcept;

  /// Until stop(), which also counts when it was called before. False when a callback's exception
  /// ended it.
  bool run();
  /// One round: waits at most until the deadline for something to do, then does it.
  void run_once(Deadline deadline);
  void stop();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Blocks SIGTERM, SIGINT and SIGHUP in the calling thread (and those it starts later) and makes
/// them readable: each asks for an orderly end. A SIGHUP that the parent had ignored (nohup) stays
/// ignored. SIGPIPE is ignored.
class SignalFd {
 public:
  SignalFd();  ///< Throws Exception.
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// The signal number, or 0 when none is pending.
  int take() noexcept;

 private:
  UniqueFd fd_;
};

}  // namespace kvferry::ipc
