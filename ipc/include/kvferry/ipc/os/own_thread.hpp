// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/os/home_process.hpp"

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace kvferry::ipc {

/// A thread of this process that has a name (as `ps -L` and tracers show it), takes no signals that
/// are meant for others, and whose end is waited for with a limit.
/// @threading constructor, wait_end() and destructor one thread.
class OwnThread {
 public:
  /// What the thread may run, and so what becomes of it when it does not end.
  enum class Runs : std::uint8_t {
    /// Our code alone, each wait of which has a deadline: a thread that does not end within
    /// kEndsWithin is our mistake, and ends this process.
    kOurCode = 1,
    /// Callbacks of an engine as well, which may take as long as they like in a process that is not
    /// ours to end: wait_end() goes on waiting and says so each time that kEndsWithin has passed.
    kEngineCode,
  };
  /// Time in which this process was stopped does not count. Longer than all that a thread may still
  /// have to wait for when it is told to end: a clear with a terabyte of pinned memory takes 64 s
  /// at most.
  static constexpr auto kEndsWithin = std::chrono::seconds(120);

  /// Runs the body on a new thread. @pre name has at most 15 characters. Throws std::system_error.
  OwnThread(std::string name, Runs runs, std::function<void()> body);
  OwnThread(const OwnThread&) = delete;
  OwnThread& operator=(const OwnThread&) = delete;
  ~OwnThread() { wait_end(); }

  /// Until the body has returned; whoever calls has told it to. A wait that is noticeable is logged
  /// at its start and end. In a forked child, which has no such thread: at once. @param ends_within
  /// for tests.
  void wait_end(Duration ends_within = kEndsWithin);

 private:
  void await_body(Duration ends_within);
  [[nodiscard]] bool has_ended(std::unique_lock<std::mutex>& lock);

  const HomeProcess home_;
  const std::string name_;
  const Runs runs_;
  std::mutex mutex_;  ///< Guards ended_.
  std::condition_variable changed_;
  bool ended_ = false;
  // wait-none: wait_end() waits for it
  std::thread thread_;  ///< Last: starts when all above exists.
};

}  // namespace kvferry::ipc
