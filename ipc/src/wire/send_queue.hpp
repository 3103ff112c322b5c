// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"

#include <atomic>
#include <cstddef>
#include <memory>

namespace kvferry::ipc {

/// What was sent to one peer and has not left this process: ZeroMQ counts messages only, and tells
/// nobody when there is room again.
/// @threading add() and try_reserve() from the server's thread, left() from ZeroMQ's.
class SendQueue {
 public:
  /// wake is signalled when there is room again for a peer that was found full.
  SendQueue(std::size_t max_messages, std::size_t max_bytes, std::shared_ptr<const EventFd> wake)
      : max_messages_(max_messages), max_bytes_(max_bytes), wake_(std::move(wake)) {}

  [[nodiscard]] std::size_t max_messages() const noexcept { return max_messages_; }
  [[nodiscard]] std::size_t max_bytes() const noexcept { return max_bytes_; }
  /// False when the queue is full; an empty one takes a message of any size.
  [[nodiscard]] bool try_reserve(std::size_t size_bytes) noexcept {
    const std::size_t messages = messages_.load();
    if (messages != 0 && (messages >= max_messages_ || bytes_.load() + size_bytes > max_bytes_)) {
      full_.store(true);
      if (!has_room()) {
        return false;
      }
      wake_->signal();  // It was emptied just now, and nobody else will say so.
      return false;
    }
    ++messages_;
    bytes_ += size_bytes;
    return true;
  }
  void left(std::size_t size_bytes) noexcept {
    bytes_ -= size_bytes;
    --messages_;
    if (full_.load() && has_room()) {
      wake_->signal();
    }
  }
  /// Whether a peer that was found full has room again; true once.
  [[nodiscard]] bool take_writable() noexcept {
    return full_.load() && has_room() && full_.exchange(false);
  }

 private:
  // Half empty, so that not every message that leaves wakes somebody.
  [[nodiscard]] bool has_room() const noexcept {
    return messages_.load() <= max_messages_ / 2 && bytes_.load() <= max_bytes_ / 2;
  }

  std::size_t max_messages_;
  std::size_t max_bytes_;
  std::shared_ptr<const EventFd> wake_;  // Shared: the last message may leave after its server.
  std::atomic<std::size_t> messages_{0};
  std::atomic<std::size_t> bytes_{0};
  std::atomic<bool> full_{false};
};

}  // namespace kvferry::ipc
