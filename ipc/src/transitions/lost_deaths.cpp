// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "transitions/lost_deaths.hpp"

#include <algorithm>

namespace kvferry::ipc {

LostDeaths::LostDeaths(const TransitionTrace& trace)
    : last_(trace.writers.size(), std::chrono::nanoseconds::min()) {
  std::vector<std::chrono::nanoseconds> first(trace.writers.size(),
                                              std::chrono::nanoseconds::max());
  for (const TransitionRecord& record : trace.records) {
    last_[record.writer] = std::max(last_[record.writer], record.time);
    if (!is_of_jobs(record.transition)) {
      first[record.writer] = std::min(first[record.writer], record.time);
    }
  }
  for (std::size_t i = 0; i < trace.writers.size(); ++i) {
    if (trace.writers[i].lost > 0) kept_since_.emplace_back(i, first[i]);
  }
}

bool LostDeaths::may_be_of(std::size_t writer, const TransitionRecord& before) const {
  if (last_[writer] > before.time) return false;
  return std::any_of(kept_since_.begin(), kept_since_.end(), [&](const auto& kept) {
    return kept.first != writer && kept.second > last_[writer];
  });
}

}  // namespace kvferry::ipc
