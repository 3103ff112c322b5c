// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace kvferry::ipc::lease {

/// The answer of a call that was handed to the lease thread. Copies share it (shared_ptr: the
/// caller may give up at its deadline while the lease thread still works on it).
template <typename T> class Answer {
 public:
  void set(Result<T> result) const {
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->result) return;
      state_->result.emplace(std::move(result));
    }
    state_->changed.notify_all();
  }
  /// Nothing when the deadline passed first.
  [[nodiscard]] std::optional<Result<T>> wait(Deadline deadline) const {
    std::unique_lock lock(state_->mutex);
    // wait: own lease thread; deadline, of the caller; nothing
    if (!state_->changed.wait_until(lock, deadline.when(),
                                    [&] { return state_->result.has_value(); })) {
      return std::nullopt;
    }
    return std::move(state_->result);
  }

 private:
  struct State {
    std::mutex mutex;  ///< Guards result.
    std::condition_variable changed;
    std::optional<Result<T>> result;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace kvferry::ipc::lease
