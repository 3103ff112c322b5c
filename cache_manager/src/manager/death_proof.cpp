// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/death_proof.hpp"

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
    if (pair.second == worker) {
      pairs.push_back(pair);
    }
  }
  workers_.erase(worker);
  for (const Pair& pair : pairs) {
    proven(pair);
  }
}

void DeathProof::ask(const Pair& pair) {
  ipc::QuiesceStaging quiesce;
  quiesce.mover = pair.first;
  quiesce.deadline = kQuiesce;
  context_.calls.call(pair.second, ipc::MessageKind::kQuiesceStaging, quiesce,
                      ipc::Deadline::after(kQuiesce + kAnswerMargin),
                      [this, pair](const ipc::Result<ipc::Envelope>& answer) {
                        if (answer || !is_living(pair.second)) {
                          proven(pair);
                          return;
                        }
                        if (!open_.contains(pair)) {
                          return;
                        }
                        ipc::log_warn("worker {} has not quiesced the staging of dead mover {}: {}",
                                      pair.second.hex(), pair.first.hex(),
                                      answer.error().to_string());
                        context_.loop.after(kAskAgain, [this, pair] {
                          if (open_.contains(pair)) {
                            ask(pair);
                          }
                        });
                      });
}

void DeathProof::proven(const Pair& pair) {
  if (open_.erase(pair) == 0) {
    return;
  }
  ipc::log_info("nothing of dead mover {} touches a block any more", pair.first.hex());
  context_.jobs.mover_untouchable(pair.first, pair.second);
}

}  // namespace kvferry::cache_manager
