// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/death_proof.hpp"

#include "kvferry/ipc/transitions/mutants.hpp"

#include <chrono>
#include <vector>

namespace kvferry::cache_manager {
namespace {

constexpr std::chrono::milliseconds kQuiesce{3000};
constexpr std::chrono::milliseconds kAnswerMargin{1000};
constexpr std::chrono::milliseconds kAskAgain{500};

}  // namespace

void DeathProof::watch_worker(const ipc::IncarnationId& worker) {
  const ipc::ProcessRef* known = context_.server.process(worker);
  if (known == nullptr) {
    return;
  }
  auto own = ipc::ProcessRef::of_pid(known->pid());
  if (!own || own->start_time() != known->start_time()) {
    ipc::log_debug("worker {} (pid {}) is gone already", worker.hex(), known->pid());
    return;
  }
  workers_.insert_or_assign(worker, std::move(own).value());
}

bool DeathProof::is_living(const ipc::IncarnationId& worker) const {
  const auto at = workers_.find(worker);
  return at == workers_.end() ? context_.directory.is_living(worker) : !at->second.has_died();
}

void DeathProof::mover_died(const ipc::IncarnationId& mover) {
  for (const ipc::IncarnationId& worker : context_.jobs.workers_used_by(mover)) {
    if (!is_living(worker)) {
      note_death(worker);
      context_.jobs.mover_untouchable(mover, worker);
      continue;
    }
    if (ipc::is_mutant("writes_off_what_a_worker_runs")) {
      context_.jobs.mover_untouchable(mover, worker);
      continue;
    }
    const Pair pair{mover, worker};
    if (open_.insert(pair).second) {
      ipc::log_info("waiting for worker {} to quiesce the staging of dead mover {}", worker.hex(),
                    mover.hex());
      ask(pair);
    }
  }
}

void DeathProof::worker_died(const ipc::IncarnationId& worker) {
  std::vector<Pair> pairs;
  for (const Pair& pair : open_) {
    if (pair.worker == worker) {
      pairs.push_back(pair);
    }
  }
  workers_.erase(worker);
  std::erase_if(settling_, [&worker](const Pair& pair) { return pair.worker == worker; });
  for (const Pair& pair : pairs) {
    proven(pair);
  }
}

// Before the server may have noticed it.
void DeathProof::note_death(const ipc::IncarnationId& worker) {
  context_.transitions.record(ipc::Transition::kManagerSeesDeath, {.peer = worker});
}

void DeathProof::ask(const Pair& pair) {
  ipc::QuiesceStaging quiesce;
  quiesce.mover = pair.mover;
  quiesce.deadline = kQuiesce;
  context_.calls.call(pair.worker, ipc::MessageKind::kQuiesceStaging, quiesce,
                      ipc::Deadline::after(kQuiesce + kAnswerMargin),
                      [this, pair](const ipc::Result<ipc::Envelope>& answer) {
                        if (!is_living(pair.worker)) {
                          note_death(pair.worker);
                          proven(pair);
                          return;
                        }
                        if (answer) {
                          proven(pair);
                          return;
                        }
                        if (!open_.contains(pair)) {
                          return;
                        }
                        ipc::log_warn("worker {} has not quiesced the staging of dead mover {}: {}",
                                      pair.worker.hex(), pair.mover.hex(),
                                      answer.error().to_string());
                        context_.loop.after(kAskAgain, [this, pair] {
                          if (open_.contains(pair)) {
                            ask(pair);
                          }
                        });
                      });
}

void DeathProof::settle(const EngineRecord& engine) {
  for (const Pair& pair : engine.unsettled()) {
    if (settling_.insert(pair).second) {
      ask_to_settle(pair);
    }
  }
}

void DeathProof::ask_to_settle(const Pair& pair) {
  ipc::QuiesceStaging quiesce;
  quiesce.mover = pair.mover;
  quiesce.others = true;
  quiesce.deadline = kQuiesce;
  context_.calls.call(
      pair.worker, ipc::MessageKind::kQuiesceStaging, quiesce,
      ipc::Deadline::after(kQuiesce + kAnswerMargin),
      [this, pair](const ipc::Result<ipc::Envelope>& answer) { on_settle_answer(pair, answer); });
}

void DeathProof::on_settle_answer(const Pair& pair, const ipc::Result<ipc::Envelope>& answer) {
  EngineRecord* engine = context_.directory.engine_of(pair.worker);
  const bool wanted = engine != nullptr && engine->find(pair.worker) != nullptr &&
                      engine->find(pair.mover) != nullptr;
  if (!wanted) {
    settling_.erase(pair);
    return;
  }
  if (answer) {
    settling_.erase(pair);
    engine->note_settled(pair);
    context_.engine_changed(*engine);
    return;
  }
  ipc::log_warn("worker {} may still work for another mover than {}: {}; offload waits for it",
                pair.worker.hex(), pair.mover.hex(), answer.error().to_string());
  context_.loop.after(kAskAgain, [this, pair] {
    if (settling_.contains(pair)) {
      ask_to_settle(pair);
    }
  });
}

void DeathProof::proven(const Pair& pair) {
  if (open_.erase(pair) == 0) {
    return;
  }
  ipc::log_info("nothing of dead mover {} touches a block any more", pair.mover.hex());
  context_.jobs.mover_untouchable(pair.mover, pair.worker);
}

}  // namespace kvferry::cache_manager
