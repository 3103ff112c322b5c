// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "manager/context.hpp"

#include <functional>
#include <optional>

namespace kvferry::cache_manager {

/// The timer behind the job table's deadlines, and what follows for a mover that is stuck.
/// @threading the loop's thread.
class OverdueJobs {
 public:
  /// on_expired is called after deadlines have passed.
  OverdueJobs(ManagerContext& context, std::function<void()> on_expired);
  OverdueJobs(const OverdueJobs&) = delete;
  OverdueJobs& operator=(const OverdueJobs&) = delete;
  ~OverdueJobs();

  /// To be called whenever the jobs may have changed.
  void arm();

 private:
  void kill_stuck();

  ManagerContext& context_;
  std::function<void()> on_expired_;
  std::optional<ipc::TimePoint> armed_;
  ipc::TimerId timer_ = 0;
};

}  // namespace kvferry::cache_manager
