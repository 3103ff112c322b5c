// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/urgency.hpp"

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace kvferry::cache_manager {

/// Jobs that may be sent, by urgency: but every kFairShare-th that is taken is the oldest, so that
/// a job with n older ones in the queue waits for at most kFairShare * (n + 1) others, whatever
/// their urgency, while there is room for such as it. @threading one thread.
class JobQueue {
 public:
  static constexpr std::uint32_t kFairShare = 8;

  void add(ipc::JobId job, const ipc::Urgency& urgency) {
    by_urgency_.emplace(urgency, job.value);
    by_age_.emplace(job.value, urgency);
  }
  void remove(ipc::JobId job) {
    const auto found = by_age_.find(job.value);
    if (found == by_age_.end()) return;
    by_urgency_.erase({found->second, job.value});
    by_age_.erase(found);
  }
  [[nodiscard]] bool empty() const noexcept { return by_age_.empty(); }
  /// @pre not empty, as for all below
  [[nodiscard]] std::uint8_t highest_priority() const {
    return by_urgency_.begin()->first.priority;
  }
  /// has_room: whether a job of some priority may be taken; one of the highest may. The oldest
  /// keeps its turn until there is room for it.
  template <typename HasRoom> [[nodiscard]] ipc::JobId take(HasRoom has_room) {
    const auto& [oldest, urgency] = *by_age_.begin();
    if (taken_ + 1 < kFairShare) {
      ++taken_;
    } else if (has_room(urgency.priority)) {
      taken_ = 0;
      return take_job(oldest);
    }
    return take_most_urgent();
  }
  /// Whoever's turn it is.
  [[nodiscard]] ipc::JobId take_most_urgent() { return take_job(by_urgency_.begin()->second); }

 private:
  using Place = std::pair<ipc::Urgency, std::uint64_t>;
  struct Before {
    bool operator()(const Place& a, const Place& b) const noexcept {
      if (a.first.goes_before(b.first)) return true;
      return !b.first.goes_before(a.first) && a.second < b.second;
    }
  };
  ipc::JobId take_job(std::uint64_t job) {
    remove(ipc::JobId{job});
    return ipc::JobId{job};
  }

  std::set<Place, Before> by_urgency_;            ///< Of equal ones the oldest first.
  std::map<std::uint64_t, ipc::Urgency> by_age_;  ///< Job ids grow with time.
  std::uint32_t taken_ = 0;                       ///< Since the oldest was.
};

}  // namespace kvferry::cache_manager
