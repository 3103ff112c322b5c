// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/engine.hpp"

#include <algorithm>

/// Pauses and flushes, as the engine's client asks for them from poll().
namespace kvferry::cli {

void Engine::hold(worker::PauseMode mode) {
  held_ = mode;
  ++counters_.pauses;
  end_prefetches();
  if (mode == worker::PauseMode::kInPlace) return;
  if (mode == worker::PauseMode::kAbort) {
    for (const std::size_t request : begun_) abort(request);
    begun_.clear();
  }
  std::vector<AttemptId> frozen;
  for (auto& [id, attempt] : attempts_) {
    if (!attempt.doomed) stop_for(mode, attempt);
    if (attempt.frozen) frozen.push_back(id);
  }
  // The others end when what is in flight of them has ended.
  for (const AttemptId id : frozen) end_attempt(id);
}

void Engine::resume() {
  held_.reset();
  std::vector<AttemptId> frozen;
  for (const auto& [id, attempt] : attempts_) {
    if (attempt.frozen) frozen.push_back(id);
  }
  for (const AttemptId id : frozen) {
    Attempt& attempt = attempts_.at(id);
    attempt.frozen = false;
    start_step(id, attempt);
  }
  progress_at_ = ipc::MonotonicClock::now();
  pump_later();
}

worker::ScheduledWork Engine::count() const {
  worker::ScheduledWork work;
  for (const auto& [id, attempt] : attempts_) ++(attempt.frozen ? work.frozen : work.running);
  work.waiting = waiting_.size();
  return work;
}

void Engine::reset_cache() {
  ++counters_.flushes;
  end_prefetches();
  for (GroupIndex& group : index_) group.forget_all();
}

// What is not in flight is not worked on any more.
void Engine::stop_for(worker::PauseMode mode, Attempt& attempt) {
  if (mode == worker::PauseMode::kAbort) {
    attempt.doomed = true;
    abort(attempt.request);
  } else {
    put_back(attempt);
  }
}

// Requests of the trace that were not begun yet have not arrived: an abort leaves them.
void Engine::abort(std::size_t request) {
  end_prefetch(request, nullptr);
  waiting_.erase(request);
  hashes_.erase(request);
  failures_.erase(request);
  ++counters_.aborted;
}

bool Engine::holds_back(AttemptId id, Attempt& attempt) {
  if (!held_) return false;
  if (*held_ == worker::PauseMode::kInPlace) {
    attempt.frozen = true;
    pump_later();
    return true;
  }
  stop_for(*held_, attempt);
  end_attempt(id);
  return true;
}

}  // namespace kvferry::cli
