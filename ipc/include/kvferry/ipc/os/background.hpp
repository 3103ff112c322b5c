// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/own_thread.hpp"

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

namespace kvferry::ipc {

/// A thread for work that nobody waits for, done in its order.
/// @threading post() any. @lifetime the destructor does what is left.
class Background {
 public:
  explicit Background(std::string name);
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  ~Background();

  void post(std::function<void()> work);

 private:
  void run();

  std::mutex mutex_;  ///< Guards the two below.
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::condition_variable changed_;
  std::optional<OwnThread> thread_;
};

}  // namespace kvferry::ipc
