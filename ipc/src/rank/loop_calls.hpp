// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"

#include <functional>
#include <memory>
#include <utility>

namespace kvferry::ipc {

/// Calls of a loop, posted from any thread. None runs after this object's end: the loop may come to
/// them when what they name is gone. @threading post() from any thread, the rest on the loop's.
class LoopCalls {
 public:
  explicit LoopCalls(EventLoop& loop) : loop_(loop) {}
  LoopCalls(const LoopCalls&) = delete;
  LoopCalls& operator=(const LoopCalls&) = delete;
  ~LoopCalls() = default;

  void post(std::function<void()> work) {
    loop_.post([alive = std::weak_ptr<int>(alive_), work = std::move(work)] {
      if (alive.lock()) work();
    });
  }
  [[nodiscard]] EventLoop& loop() noexcept { return loop_; }

 private:
  EventLoop& loop_;
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);
};

}  // namespace kvferry::ipc
