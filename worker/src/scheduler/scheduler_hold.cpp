// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/check.hpp"
#include "scheduler/scheduler.hpp"

#include <vector>

/// Pauses and flushes, as the scheduler's client asks for them from poll().
namespace kvferry::worker {

void Scheduler::hold(PauseMode mode) {
  held_ = mode;
  end_prefetches();
  if (mode == PauseMode::kAbort) {
    for (auto& [number, sequence] : sequences_) {
      if (sequence.fate == Sequence::Fate::kEnds) continue;
      answer(sequence, ipc::GenerateEnd::kAborted);
      sequence.fate = Sequence::Fate::kEnds;
    }
    for (const Number number : std::vector(waiting_.begin(), waiting_.end())) end(number);
  }
  // The others when what is in flight of them has ended.
  for (const Number number : std::vector(admitted_.begin(), admitted_.end())) {
    Sequence& sequence = sequences_.at(number);
    if (mode == PauseMode::kRetract && sequence.fate == Sequence::Fate::kGoesOn) {
      sequence.fate = Sequence::Fate::kWaits;
    }
    if (!sequence.in_flight()) settle(number);
  }
}

void Scheduler::resume() {
  held_.reset();
  for (const Number number : admitted_) {
    Sequence& sequence = sequences_.at(number);
    if (sequence.state == Sequence::State::kFrozen) sequence.state = Sequence::State::kReady;
  }
  pump_later();
}

ScheduledWork Scheduler::count() const {
  ScheduledWork work;
  for (const Number number : admitted_) {
    const bool frozen = sequences_.at(number).state == Sequence::State::kFrozen;
    ++(frozen ? work.frozen : work.running);
  }
  work.waiting = waiting_.size();
  return work;
}

void Scheduler::reset_cache() {
  end_prefetches();
  cache_.forget_contents();
}

void Scheduler::settle(Number number) {
  Sequence& sequence = sequences_.at(number);
  switch (sequence.fate) {
    case Sequence::Fate::kEnds: end(number); break;
    case Sequence::Fate::kWaits: retract(sequence); break;
    case Sequence::Fate::kGoesOn:
      // Other pauses have given it another fate.
      sequence.state = held_ ? Sequence::State::kFrozen : Sequence::State::kReady;
      break;
  }
  pump_later();
}

void Scheduler::retract(Sequence& sequence) {
  cache_.release(sequence);
  sequence.fate = Sequence::Fate::kGoesOn;
  sequence.state = Sequence::State::kWaiting;
  sequence.mixed = false;
  sequence.load_tries = 0;
  admitted_.erase(sequence.number);
  waiting_.insert(sequence.number);
}

void Scheduler::end(Number number) {
  const auto found = sequences_.find(number);
  KVFERRY_CHECK(found != sequences_.end(), "a request ended twice");
  end_prefetch(number);
  cache_.release(found->second);
  tokens_owed_ -= found->second.prompt_tokens + std::uint64_t{found->second.max_tokens};
  waiting_.erase(number);
  admitted_.erase(number);
  sequences_.erase(found);
}

}  // namespace kvferry::worker
