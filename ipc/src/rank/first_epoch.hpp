// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "rank/lifecycle_thread.hpp"
#include "rank/loop_calls.hpp"
#include "rank/rank_lease.hpp"

#include <functional>
#include <optional>

namespace kvferry::ipc {

/// The owner's first epoch, made manager or not. Memory that an earlier life's peers still pin
/// comes back when they let go or end: it is waited for a while, from the loop, so that signals and
/// the manager are served meanwhile.
/// @threading the loop's thread. @lifetime lifecycle ends first.
class FirstEpoch {
 public:
  FirstEpoch(LoopCalls& calls,
             LifecycleThread& lifecycle,
             RankLease& lease,
             std::function<void(const Error&)> on_failed);
  FirstEpoch(const FirstEpoch&) = delete;
  FirstEpoch& operator=(const FirstEpoch&) = delete;
  ~FirstEpoch();

  /// Allocates it, or begins to wait for it. Throws Exception when waiting cannot mend it. What
  /// goes wrong later is told to on_failed.
  void start();

 private:
  void await_memory(Deadline deadline, const Error& why);
  void on_tried(Deadline deadline, const Result<Epoch>& epoch);

  LoopCalls& calls_;
  LifecycleThread& lifecycle_;
  RankLease& lease_;
  std::function<void(const Error&)> on_failed_;
  TimerId timer_ = 0;
  std::optional<TimePoint> awaited_;  ///< Since when it is waited for.
};

}  // namespace kvferry::ipc
