// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/lifecycle_thread.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <exception>
#include <utility>

namespace kvferry::ipc {

// It empties the caching allocator of an engine.
LifecycleThread::LifecycleThread(const char* name)
    : thread_(name, OwnThread::Runs::kEngineCode, [this] { run(); }) {}

LifecycleThread::~LifecycleThread() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    tasks_.clear();
  }
  changed_.notify_one();
  // wait: its running command, whose waits are cancelled or have deadlines of their own;
  // wait_end() gives it kEndsWithin; its end
  thread_.wait_end();  // tasks_ and changed_ are still there
}

void LifecycleThread::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void LifecycleThread::run() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock lock(mutex_);
      // wait-idle: commands; post() or the end of this object; thread kvf-lifecycle, kvf-upkeep
      changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
      if (stopping_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    try {
      task();
    } catch (const std::exception& error) {
      log_error("lifecycle command failed: {}", error.what());
    }
  }
}

}  // namespace kvferry::ipc
