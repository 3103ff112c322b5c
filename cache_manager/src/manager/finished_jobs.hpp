// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

namespace kvferry::cache_manager {

/// A client's jobs that are over, so that none of them runs twice. Ids grow by one, so what is over
/// is one run of them and a few more behind what still runs; beyond kMaxRuns all between the two
/// lowest runs counts as over, too. @threading one thread.
class FinishedJobs {
 public:
  static constexpr std::size_t kMaxRuns = 1024;

  void add(ipc::JobId job) {
    const std::uint64_t id = job.value;
    if (contains(job)) return;
    const auto next = runs_.upper_bound(id);
    const bool joins_next = next != runs_.end() && next->first - 1 == id;
    const auto before = next == runs_.begin() ? runs_.end() : std::prev(next);
    const bool joins_before = before != runs_.end() && before->second + 1 == id;
    const std::uint64_t last = joins_next ? next->second : id;
    if (joins_next) runs_.erase(next);
    if (joins_before) {
      before->second = last;
    } else {
      runs_.emplace(id, last);
    }
    if (runs_.size() > kMaxRuns) {
      const auto lowest = runs_.begin();
      const auto second = std::next(lowest);
      lowest->second = second->second;
      runs_.erase(second);
    }
  }

  /// Also true for jobs between runs that are kept as one.
  [[nodiscard]] bool contains(ipc::JobId job) const {
    const auto next = runs_.upper_bound(job.value);
    return next != runs_.begin() && job.value <= std::prev(next)->second;
  }

  /// How many runs there are: what this takes in memory.
  [[nodiscard]] std::size_t runs() const noexcept { return runs_.size(); }

 private:
  std::map<std::uint64_t, std::uint64_t> runs_;  ///< First and last id of each.
};

}  // namespace kvferry::cache_manager
