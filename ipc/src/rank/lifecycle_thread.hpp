// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/own_thread.hpp"

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace kvferry::ipc {

/// Runs commands one after another, off the event loop: clears and re-inits, which wait for peers,
/// or updates of weights, which wait for disks.
/// @threading post() from any thread. The destructor waits for the running task
/// only, which ends by its own deadline.
class LifecycleThread {
 public:
  explicit LifecycleThread(const char* name);
  LifecycleThread(const LifecycleThread&) = delete;
  LifecycleThread& operator=(const LifecycleThread&) = delete;
  ~LifecycleThread();

  void post(std::function<void()> task);

 private:
  void run();

  std::mutex mutex_;  // guards stopping_ and tasks_
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<std::function<void()>> tasks_;
  OwnThread thread_;  // last: starts when all above exists
};

}  // namespace kvferry::ipc
