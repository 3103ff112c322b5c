// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cache_tracker.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::worker {
namespace {

/// A manager cannot make an engine believe in another number of ranks or in absurd block counts.
Status check_state(const ipc::EngineState& state, const ClientOptions& options) {
  if (!state.ranks.empty() && state.ranks.size() != options.ranks) {
    return KVFERRY_ERROR(kProtocol, "EngineState lists {} ranks, expected {}", state.ranks.size(),
                         options.ranks);
  }
  if (state.offload_ready && state.ranks.size() != options.ranks) {
    return KVFERRY_ERROR(kProtocol, "EngineState is offload_ready with {} of {} ranks",
                         state.ranks.size(), options.ranks);
  }
  if (state.rules.size() > ipc::kMaxGroups) {
    return KVFERRY_ERROR(kProtocol, "EngineState has rules for {} groups, {} are allowed",
                         state.rules.size(), ipc::kMaxGroups);
  }
  return ipc::ok();
}

}  // namespace

Status CacheTracker::take(const ipc::Bytes& body) {
  KVFERRY_ASSIGN(auto state, ipc::decode<ipc::EngineState>(body, "EngineState"));
  KVFERRY_TRY(check_state(state, options_));
  if (state.refused) {
    ipc::log_error("client: engine {} cannot use its workers: {}", options_.engine,
                   state.refused->to_string());
  } else if (state.generation != state_.generation) {
    ipc::log_info("client: engine {}: generation {} -> {}", options_.engine, state_.generation,
                  state.generation);
  }
  const auto phase = static_cast<CachePhase>(state.phase);
  const bool other_generation =
      std::exchange(state_.generation, state.generation) != state.generation;
  const bool other_phase = std::exchange(state_.phase, phase) != phase;
  const bool other_offload =
      std::exchange(state_.offload_ready, state.offload_ready) != state.offload_ready;
  // A young manager does not know them before the workers have reported.
  const bool other_weights =
      phase == CachePhase::kReady && std::exchange(state_.weights, state.weights) != state.weights;
  std::vector<ArenaId> ranks;
  ranks.reserve(state.ranks.size());
  for (const ipc::RankArena& rank : state.ranks) {
    ranks.push_back(ArenaId{rank.session, rank.epoch, rank.prepared_by, rank.worker});
  }
  const bool other_contents = !state.refused && count_contents(state, ranks);
  if (other_generation && !state.refused) note(CacheEventKind::kGeneration);
  if (other_contents) note(CacheEventKind::kContents);
  if (other_weights && !state.refused) note(CacheEventKind::kWeights);
  if (other_phase) note(CacheEventKind::kPhase);
  if (other_offload) note(CacheEventKind::kOffload);
  if (state.refused && !state_.refused) note(CacheEventKind::kRefused);
  state_.ranks = std::move(ranks);
  state_.group_blocks = std::move(state.group_blocks);
  root_ = state.root;
  rules_ = std::move(state.rules);
  state_.refused = std::move(state.refused);
  return ipc::ok();
}

// Other phases tell of no ranks: a manager that has just come, or a worker that has just died, may
// yet be followed by the same contents.
bool CacheTracker::count_contents(const ipc::EngineState& state,
                                  const std::vector<ArenaId>& ranks) {
  const auto phase = static_cast<CachePhase>(state.phase);
  if (phase == CachePhase::kCleared) {
    if (contents_.ranks.empty()) return false;
    contents_ = {};
    ++state_.contents;
    return true;
  }
  if (phase != CachePhase::kReady || ranks.empty()) return false;
  const bool is_said_to_be_other =
      contents_.is_of_this_manager && contents_.generation != state.generation;
  const bool is_same =
      !is_said_to_be_other && contents_.group_blocks == state.group_blocks &&
      std::equal(
          ranks.begin(), ranks.end(), contents_.ranks.begin(), contents_.ranks.end(),
          [](const ArenaId& now, const ArenaId& before) { return same_contents(now, before); });
  contents_ = {ranks, state.group_blocks, state.generation, /*is_of_this_manager=*/true};
  if (!is_same) ++state_.contents;
  return !is_same;
}

Status CacheTracker::greet(const ipc::Bytes& body, bool first) {
  const std::size_t events_before = events_.size();
  contents_.is_of_this_manager = false;
  KVFERRY_TRY(take(body));
  state_.manager_connected = true;
  if (first) {
    events_.clear();  // What is found at first is no change.
  } else if (options_.events) {
    note(CacheEventKind::kManagerFound);
    // Told before what it brought.
    std::rotate(
        events_.begin() + static_cast<std::ptrdiff_t>(std::min(events_before, events_.size() - 1)),
        events_.end() - 1, events_.end());
  }
  return ipc::ok();
}

void CacheTracker::lose_manager() {
  const bool was_connected = state_.manager_connected;
  close();
  if (was_connected) note(CacheEventKind::kManagerLost);
}

void CacheTracker::close() noexcept {
  state_.manager_connected = false;
  state_.offload_ready = false;
}

void CacheTracker::note(CacheEventKind kind) {
  if (!options_.events) return;
  constexpr std::size_t kMostKept = 1024;
  if (events_.size() >= kMostKept) {
    events_.pop_front();
    ++stats_.events_dropped;
  }
  events_.push_back({kind, state_.generation, state_.phase, state_.offload_ready, state_.contents});
}

std::vector<CacheEvent> CacheTracker::take_events() {
  std::vector<CacheEvent> taken(events_.begin(), events_.end());
  events_.clear();
  return taken;
}

}  // namespace kvferry::worker
