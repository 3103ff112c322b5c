// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"

#include <cstdint>
#include <set>
#include <utility>

namespace kvferry::cache_manager {

/// Jobs that may be sent, by priority: but every kFairShare-th that is taken is the oldest, so that
/// a job with n older ones in the queue waits for at most kFairShare * (n + 1) others, whatever
/// their priorities. @threading one thread.
class JobQueue {
 public:
  static constexpr std::uint32_t kFairShare = 8;

  void add(ipc::JobId job, std::uint8_t priority) {
    by_priority_.emplace(-static_cast<int>(priority), job.value);
    by_age_.emplace(job.value, priority);
  }
  void remove(ipc::JobId job, std::uint8_t priority) {
    by_priority_.erase({-static_cast<int>(priority), job.value});
    by_age_.erase({job.value, priority});
  }
  [[nodiscard]] bool empty() const noexcept { return by_age_.empty(); }
  /// @pre not empty, as for all below
  [[nodiscard]] std::uint8_t highest_priority() const {
    return static_cast<std::uint8_t>(-by_priority_.begin()->first);
  }
  [[nodiscard]] ipc::JobId take() {
    const bool is_oldests_turn = ++taken_ % kFairShare == 0;
    return is_oldests_turn ? take(by_age_.begin()->first) : take_highest();
  }
  /// Whoever's turn it is.
  [[nodiscard]] ipc::JobId take_highest() { return take(by_priority_.begin()->second); }

 private:
  ipc::JobId take(std::uint64_t job) {
    const auto aged = by_age_.lower_bound({job, 0});
    remove(ipc::JobId{job}, aged->second);
    return ipc::JobId{job};
  }

  std::set<std::pair<int, std::uint64_t>> by_priority_;      ///< Highest first, then the oldest.
  std::set<std::pair<std::uint64_t, std::uint8_t>> by_age_;  ///< Job ids grow with time.
  std::uint32_t taken_ = 0;
};

}  // namespace kvferry::cache_manager
