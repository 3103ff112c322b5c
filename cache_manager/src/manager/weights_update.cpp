// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The update of an engine's weights: idle or paused, prepared on every rank, committed on every
// rank.
#include "manager/generation_operations.hpp"
#include "manager/generation_rounds.hpp"
#include "manager/rank_errors.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// For the commit and what comes after it, when preparing took all the time there was.
constexpr std::chrono::seconds kCommitTime{15};
/// Through one small buffer from memory that is not pinned.
constexpr std::chrono::seconds kCommitTimePerGib{1};

}  // namespace

void GenerationOperations::update_weights(const ipc::Peer& peer,
                                          const ipc::Envelope& request,
                                          const ipc::UpdateWeightsRequest& message,
                                          EngineRecord& engine) {
  const OperationRef operation = begin(peer, request, engine, EngineOperation::kUpdateWeights,
                                       message.timeout + message.deadline + kCommitTime);
  operation->once_idle = message.deadline + kCommitTime;
  operation->weights = {.phase = ipc::WeightsPhase::kPrepare,
                        .update = ++last_update_,
                        .source = message.source,
                        .weights = message.weights.value_or(ipc::Digest::random()),
                        .deadline = message.deadline};
  operation->reply = [this, &update = *operation] {
    answer(update, ipc::UpdateWeightsReply{update.engine->weights(), update.updates, update.ranks,
                                           took(update), update.transport});
  };
  const auto load = [this, operation, empty_cache = message.empty_cache] {
    if (operation->error) {
      give_up(operation);
    } else {
      prepare_weights(operation, empty_cache);
    }
  };
  // Before anything is loaded. Frozen requests of a pause in place are no hindrance when nothing is
  // to be flushed; copies are, and end by themselves while nothing runs.
  // The pause is ordered again: one that was ordered before may not be in effect.
  if (engine.paused() && !message.flush_cache) {
    ask_schedulers(
        operation, schedule_of(engine), [this, operation, load, time = message.deadline] {
          if (operation->error) {
            give_up(operation);
            return;
          }
          operation->next = load;
          operation->waits_for_jobs = true;
          operation->timer =
              context_.loop.after(time, [this, operation] { idle_times_out(operation); });
          wait_for_jobs(operation);
        });
    return;
  }
  hold_idle(operation, message.timeout, [this, operation, load, flush = message.flush_cache] {
    if (flush) {
      ask_schedulers(operation, {.order = ipc::ScheduleOrder::kFlush, .wait = false}, load);
    } else {
      load();
    }
  });
}

void GenerationOperations::ask_for_weights(const OperationRef& operation,
                                           const std::function<void()>& on_failed,
                                           std::function<void()> next) {
  ask_workers(
      operation, ipc::MessageKind::kRankWeights, operation->weights,
      [operation = operation.get(), on_failed](std::uint32_t rank,
                                               const ipc::Result<ipc::Envelope>& answer) {
        const auto done = answer
                              ? ipc::decode<ipc::RankWeightsReply>(answer->body, "RankWeightsReply")
                              : ipc::Result<ipc::RankWeightsReply>(answer.error());
        ipc::RankUpdate& update = operation->updates[rank];
        if (!done) {
          update.error = in_rank(done.error(), operation->engine->name(), ipc::Rank{rank});
          on_failed();
          return;
        }
        update.weights = done->weights;
        update.bytes = std::max(update.bytes, done->bytes);
      },
      std::move(next));
}

void GenerationOperations::prepare_weights(const OperationRef& operation, bool empty_cache) {
  const auto ranks = static_cast<std::uint32_t>(operation->engine->ranks().size());
  operation->updates.resize(ranks);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    operation->updates[rank].rank = ipc::Rank{rank};
  }
  operation->workers = workers_of(*operation->engine);
  operation->prepares = true;
  if (operation->weights.source.from == ipc::WeightsFrom::kDistributed) {
    hand_weights_on(operation,
                    [this, operation, empty_cache] { prepare_ranks(operation, empty_cache); });
  } else {
    prepare_ranks(operation, empty_cache);
  }
}

void GenerationOperations::prepare_ranks(const OperationRef& operation, bool empty_cache) {
  if (operation->error) {
    abandon_weights(*operation);
    give_up(operation);
    return;
  }
  // Of a broadcast, no rank comes to its end when one of them fails. Once all have been asked: who
  // is told before that prepares after it.
  const auto call_off = [this, weak = std::weak_ptr(operation)] {
    context_.loop.post([this, weak] {
      const OperationRef failed = weak.lock();
      if (failed && failed->prepares && !failed->weights.broadcast.empty() &&
          !std::exchange(failed->called_off, true)) {
        abandon_weights(*failed);
      }
    });
  };
  ask_for_weights(operation, call_off, [this, operation, empty_cache] {
    operation->prepares = false;
    if (!operation->error && operation->workers != workers_of(*operation->engine)) {
      operation->error = KVFERRY_ERROR(
          kPeerDied,
          "engine {}: a worker that had prepared its weights is gone, nothing was changed: ask "
          "again when its successor is there",
          operation->engine->name());
    }
    if (operation->error) {
      abandon_weights(*operation);
      give_up(operation);
    } else {
      hold_for_commit(operation, empty_cache);
    }
  });
}

// The ranks' living, connected workers.
std::vector<ipc::IncarnationId> GenerationOperations::workers_of(const EngineRecord& engine) {
  std::vector<ipc::IncarnationId> workers;
  for (const RankRecord& rank : engine.ranks()) {
    workers.push_back(rank.worker && rank.worker->connected ? rank.worker->id
                                                            : ipc::IncarnationId{});
  }
  return workers;
}

// A pause outlives this manager, the hold of an idle engine does not: were it to end in the middle,
// nobody would compute with weights of which some are changed. Nor is the pause that a release made
// one that the next manager's resume may end.
void GenerationOperations::hold_for_commit(const OperationRef& operation, bool empty_cache) {
  if (operation->engine->paused() && !operation->engine->paused_by_release()) {
    commit_weights(operation, empty_cache);
    return;
  }
  ask_schedulers(operation, {.order = ipc::ScheduleOrder::kRetract},
                 [this, operation, empty_cache] {
                   if (operation->error) {
                     abandon_weights(*operation);
                     give_up(operation);
                   } else {
                     commit_weights(operation, empty_cache);
                   }
                 });
}

// Told, not asked: a rank that does not hear it finds out by the number of the next update.
void GenerationOperations::abandon_weights(const Operation& operation) {
  ipc::RankWeights order = operation.weights;
  order.phase = ipc::WeightsPhase::kAbandon;
  for (const RankRecord& rank : operation.engine->ranks()) {
    if (rank.worker) {
      context_.calls.call(rank.worker->id, ipc::MessageKind::kRankWeights, order,
                          ipc::Deadline::after(kCommitTime), [](const auto& /*answer*/) {});
    }
  }
}

void GenerationOperations::commit_weights(const OperationRef& operation, bool empty_cache) {
  operation->commits = true;
  std::uint64_t most = 0;
  for (const ipc::RankUpdate& update : operation->updates) {
    most = std::max(most, update.bytes);
  }
  const std::chrono::seconds time = kCommitTime + kCommitTimePerGib * (most >> 30U);
  operation->weights.phase = ipc::WeightsPhase::kCommit;
  operation->weights.deadline = std::chrono::milliseconds(time);
  operation->give_up = ipc::MonotonicClock::now() + time + kCommitTime;
  ask_for_weights(
      operation, [] {},
      [this, operation, empty_cache] {
        if (!operation->error && operation->engine->weights() != operation->weights.weights) {
          operation->error = KVFERRY_ERROR(
              kProtocol, "engine {}: its ranks report weights {} after a commit of {}",
              operation->engine->name(), operation->engine->weights().hex(),
              operation->weights.weights.hex());
        }
        operation->engine->set_mixed_weights(operation->error);
        if (operation->error) {
          // Some ranks have the new weights and some may not: nothing computes until all agree, and
          // somebody says that it may.
          operation->engine->set_paused(
              operation->engine->paused().value_or(ipc::PauseMode::kRetract));
          give_up(operation);
        } else if (empty_cache) {
          empty_workers(operation, ipc::EmptyReason::kUpdate,
                        [this, operation] { run_again(operation); });
        } else {
          run_again(
              operation);  // The ranks' reports came before their answers: keys have followed.
        }
      });
}

}  // namespace kvferry::cache_manager
