// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/mover_watch.hpp"

#include <algorithm>

namespace kvferry::cache_manager {

void MoverWatch::sent(const MoverLane& lane, ipc::TimePoint now) {
  const auto [at, is_new] = lanes_.try_emplace(lane);
  if (is_new) {
    at->second.due = now + deadline_;
  }
  ++at->second.open;
}

void MoverWatch::answered(const MoverLane& lane, ipc::TimePoint now) {
  // The other lane's clock goes on, but whoever answers is not stuck.
  for (auto& [key, state] : lanes_) {
    if (key == lane) {
      state.asked = false;
      state.due = now + deadline_;
    } else if (key.mover == lane.mover && state.asked) {
      state.due = std::max(state.due, now + deadline_);
    }
  }
}

void MoverWatch::closed(const MoverLane& lane) {
  const auto at = lanes_.find(lane);
  if (at != lanes_.end() && --at->second.open == 0) {
    lanes_.erase(at);
  }
}

void MoverWatch::forget(const ipc::IncarnationId& mover) {
  std::erase_if(lanes_, [&](const auto& lane) { return lane.first.mover == mover; });
}

std::optional<ipc::TimePoint> MoverWatch::next() const {
  const auto first =
      std::min_element(lanes_.begin(), lanes_.end(),
                       [](const auto& a, const auto& b) { return a.second.due < b.second.due; });
  return first == lanes_.end() ? std::nullopt : std::optional(first->second.due);
}

std::vector<MoverLane> MoverWatch::stalled(ipc::TimePoint now) const {
  std::vector<MoverLane> lanes;
  for (const auto& [key, state] : lanes_) {
    if (!state.asked && state.due <= now) {
      lanes.push_back(key);
    }
  }
  return lanes;
}

void MoverWatch::gave_up(const MoverLane& lane, ipc::TimePoint now) {
  if (const auto at = lanes_.find(lane); at != lanes_.end()) {
    at->second.asked = true;
    at->second.due = now + deadline_;
  }
}

void MoverWatch::not_before(const MoverLane& lane, ipc::TimePoint when) {
  if (const auto at = lanes_.find(lane); at != lanes_.end()) {
    at->second.due = std::max(at->second.due, when);
  }
}

std::set<ipc::IncarnationId> MoverWatch::stuck(ipc::TimePoint now) const {
  std::set<ipc::IncarnationId> movers;
  for (const auto& [key, state] : lanes_) {
    if (state.asked && state.due <= now) {
      movers.insert(key.mover);
    }
  }
  return movers;
}

}  // namespace kvferry::cache_manager
