// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Turns of sequences that the device does not hold.
#include "kvferry/ipc/base/check.hpp"
#include "longctx/turn_scheduler.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cli {
namespace {

/// That the device holds, when they are as large as they become.
constexpr std::uint32_t kWindows = 4;

}  // namespace

void TurnScheduler::begin_windows(Number number) {
  Windows windows;
  windows.number = number;
  windows.first_written = first_written(sequences_.at(number));
  windows_ = std::move(windows);
  begin_token();
}

void TurnScheduler::begin_token() {
  Windows& windows = *windows_;
  const Sequence& sequence = sequences_.at(windows.number);
  windows.unread.clear();
  windows.read.clear();
  windows.away.clear();
  windows.awaiting.clear();
  windows.loading = 0;
  windows.left = to_compute(windows.number) == 0 ? 0 : blocks_of(sequence.tokens + 1);
  for (std::uint32_t i = 0; i < windows.left; ++i) {
    switch (sequence.blocks[i].where) {
      case Where::kAway: windows.away.push_back(i); break;
      case Where::kAwaitsLoad: windows.awaiting.push_back(i); break;
      case Where::kLoading: ++windows.loading; break;
      case Where::kHere: windows.unread.push_back(i); break;
    }
  }
}

// All of what the last one has read may go for those behind it, after the turn.
bool TurnScheduler::is_last_token() const { return to_compute(windows_->number) <= 1; }

std::vector<std::uint32_t> TurnScheduler::begin_window() {
  Windows& windows = windows_.value();
  KVFERRY_CHECK(windows.reading.empty(), "a pass begins within a pass");
  const bool is_loading = windows.loading > 0 || !windows.awaiting.empty();
  if (!limits_.look_ahead && is_loading) return {};
  // The first one is small, so that loads have where to go; then they are few, and large: each has
  // to get its inputs past the loads. What could be read waits for more while loads have room.
  const std::uint32_t most =
      windows.read.empty() ? limits_.window_blocks
                           : std::max(limits_.window_blocks, limits_.device_blocks / kWindows);
  if (windows.unread.size() < most && !windows.awaiting.empty()) return {};
  while (!windows.unread.empty() && windows.reading.size() < most) {
    windows.reading.push_back(windows.unread.front());
    windows.unread.pop_front();
  }
  return windows.reading;
}

void TurnScheduler::end_window() {
  Windows& windows = windows_.value();
  KVFERRY_CHECK(!windows.reading.empty(), "a pass ended that had not begun");
  windows.left -= static_cast<std::uint32_t>(windows.reading.size());
  windows.read.insert(windows.read.end(), windows.reading.begin(), windows.reading.end());
  windows.reading.clear();
}

// A block of another one saves a load with each token that is still to come, and costs one: taken
// before those that were read, but for the last token.
void TurnScheduler::give_blocks_to_windows() {
  Windows& windows = *windows_;
  const bool has_passes = !windows.unread.empty() || !windows.reading.empty();
  if (windows.away.empty() || (!limits_.look_ahead && has_passes)) return;
  const std::vector<Number> order = this->order();
  while (!windows.away.empty()) {
    if (free_.empty() && !evict_one(order, 0) && !evict_read()) return;
    const std::uint32_t index = windows.away.front();
    windows.away.pop_front();
    take_free_block(sequences_.at(windows.number), index);
    windows.awaiting.push_back(index);
  }
}

bool TurnScheduler::evict_read() {
  Windows& windows = *windows_;
  Sequence& sequence = sequences_.at(windows.number);
  for (std::size_t i = windows.read.size(); i > 0; --i) {
    const std::uint32_t index = windows.read.front();
    windows.read.pop_front();
    const Block& block = sequence.blocks[index];
    if (index < windows.first_written && may_go(block, /*has_contents=*/true)) {
      give_up_block(sequence, index);
      return true;
    }
    windows.read.push_back(index);
  }
  return false;
}

std::optional<TurnScheduler::Job> TurnScheduler::load_of_windows() {
  if (!windows_ || windows_->awaiting.empty()) return std::nullopt;
  Windows& windows = *windows_;
  Sequence& sequence = sequences_.at(windows.number);
  std::vector<Place> places;
  while (!windows.awaiting.empty() && places.size() < limits_.job_blocks) {
    const std::uint32_t index = windows.awaiting.front();
    windows.awaiting.pop_front();
    sequence.blocks[index].where = Where::kLoading;
    places.push_back({index, sequence.blocks[index].device});
  }
  const auto count = static_cast<std::uint32_t>(places.size());
  sequence.awaiting -= count;
  windows.loading += count;
  return begin_job(Way::kLoad, windows.number, std::move(places));
}

void TurnScheduler::window_load_ended(const Job& job, bool done) {
  if (!windows_ || windows_->number != job.sequence) return;
  for (const Place& place : job.places) {
    --windows_->loading;
    if (done) {
      windows_->unread.push_back(place.index);
    } else {
      windows_->away.push_front(place.index);
    }
  }
}

}  // namespace kvferry::cli
