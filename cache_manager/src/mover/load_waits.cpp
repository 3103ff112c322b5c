// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/load_waits.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace kvferry::cache_manager {
namespace {

/// Loading time after which what was before it counts half. What happens while nothing is loaded
/// says nothing.
constexpr double kHalfLifeS = 0.5;
/// Before so much of it was seen nothing is said.
constexpr double kLeastS = 0.05;
/// Of the time under way: in rows loads have a tenth of the link less than gathered ones, for which
/// a decode is 4 to 5 % slower (docs/performance.md). Said until it is less than half of that.
constexpr double kWaitedPart = 0.1;

}  // namespace

void LoadWaits::note(ipc::TimePoint now, bool loading, std::optional<bool> computing) noexcept {
  if (loading_) {
    const double passed = std::max(0.0, std::chrono::duration<double>(now - noted_).count());
    const double kept = std::exp2(-passed / kHalfLifeS);
    loading_s_ = loading_s_ * kept + passed;
    // Of a change between two notes half is taken.
    const double waited = (waiting_ ? 0.5 : 0) + (computing == false ? 0.5 : 0);
    waiting_s_ = waiting_s_ * kept + waited * passed;
    const double part = are_waited_for_ ? kWaitedPart / 2 : kWaitedPart;
    are_waited_for_ = loading_s_ >= kLeastS && waiting_s_ > part * loading_s_;
  }
  noted_ = now;
  loading_ = loading;
  waiting_ = computing == false;
}

bool LoadWaits::are_waited_for() const noexcept { return are_waited_for_; }

}  // namespace kvferry::cache_manager
