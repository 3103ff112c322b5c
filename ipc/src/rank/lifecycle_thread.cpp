// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/lifecycle_thread.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <exception>
#include <utility>

namespace kvferry::ipc {

LifecycleThread::LifecycleThread() : thread_([this] { run(); }) {}

LifecycleThread::~LifecycleThread() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    tasks_.clear();
  }
  changed_.notify_one();
  thread_.join();
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
