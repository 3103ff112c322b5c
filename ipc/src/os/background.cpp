// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/background.hpp"

#include <utility>

namespace kvferry::ipc {

Background::Background(std::string name) {
  thread_.emplace(std::move(name), OwnThread::Runs::kOurCode, [this] { run(); });
}

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  // wait-brief: the thread's work, whose calls of the driver end; limit OwnThread::kEndsWithin
  thread_->wait_end();
}

void Background::post(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void Background::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    // wait-idle: work; post() or the end of the object; thread kvf-pool
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // what it holds ends outside the lock
    lock.lock();
  }
}

}  // namespace kvferry::ipc
