// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "mover/staging_client.hpp"

#include <chrono>
#include <functional>
#include <vector>

namespace kvferry::cache_manager {

/// Answers of staged jobs whose hand-overs were abandoned: what the worker was asked may still
/// write their blocks, so the manager must not hear that they are over before the staging client's
/// debt is paid. They hold neither arena nor pool: a clear does not wait for them.
/// @threading the lane's thread. @lifetime the client outlives it.
class HeldAnswers {
 public:
  using Answer = std::function<void(ipc::MoverJobDone)>;

  HeldAnswers(StagingClient& staging, Answer answer)
      : staging_(staging), answer_(std::move(answer)) {}

  void add(ipc::MoverJobDone done);
  [[nodiscard]] bool empty() const noexcept { return held_.empty(); }
  /// Tries to get the proof; returns once it is there, when wake_fd is readable (not drained), or
  /// after a while.
  void pursue(int wake_fd);
  /// Gives the answers if the debt is paid.
  void release_if_proven();

 private:
  struct Held {
    ipc::MoverJobDone done;
    ipc::TimePoint since;
  };

  void wait_before_retry(int wake_fd);
  void report_if_late();

  StagingClient& staging_;
  Answer answer_;
  std::vector<Held> held_;
  std::chrono::milliseconds backoff_{};
  ipc::TimePoint next_report_{};
};

}  // namespace kvferry::cache_manager
