// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"

#include <algorithm>
#include <cstddef>
#include <set>

namespace kvferry::cache_manager {

/// A client's jobs that are over, so that none of them runs twice: the ids grow, so of old ones the
/// highest is enough. @threading one thread.
class FinishedJobs {
 public:
  static constexpr std::size_t kRemembered = 4096;

  void add(ipc::JobId job) {
    remembered_.insert(job);
    if (remembered_.size() > kRemembered) {
      forgotten_ = std::max(forgotten_, *remembered_.begin());
      remembered_.erase(remembered_.begin());
    }
  }
  /// Also true for every job below those that are remembered.
  [[nodiscard]] bool contains(ipc::JobId job) const {
    return (any_forgotten() && job <= forgotten_) || remembered_.contains(job);
  }

 private:
  [[nodiscard]] bool any_forgotten() const { return remembered_.size() >= kRemembered; }

  std::set<ipc::JobId> remembered_;
  ipc::JobId forgotten_;  ///< It and all below are over.
};

}  // namespace kvferry::cache_manager
