// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The update of an engine's weights: idle or paused, prepared on every rank, committed on every
// rank.
#include "manager/generation_operations.hpp"
#include "manager/generation_rounds.hpp"
#include "manager/rank_errors.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// For the commit and what comes after it, when preparing took all the time there was.
constexpr std::chrono::seconds kCommitTime{15};

}  // namespace

void GenerationOperations::update_weights(const ipc::Peer& peer,
                                          const ipc::Envelope& request,
                                          const ipc::UpdateWeightsRequest& message,
                                          EngineRecord& engine) {
  const OperationRef operation =
      begin(peer, request, engine, EngineOperation::kUpdateWeights, message.deadline + kCommitTime);
  operation->weights = {.phase = ipc::WeightsPhase::kPrepare,
                        .update = ++last_update_,
                        .source = message.source,
                        .weights = message.weights.value_or(ipc::Digest::random()),
                        .deadline = message.deadline};
  operation->reply = [this, &update = *operation] {
    answer(update, ipc::UpdateWeightsReply{update.engine->weights(), update.updates, update.ranks,
                                           took(update)});
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
  if (engine.paused() && !message.flush_cache) {
    operation->next = load;
    operation->waits_for_jobs = true;
    operation->timer =
        context_.loop.after(message.deadline, [this, operation] { idle_times_out(operation); });
    wait_for_jobs(operation);
    return;
  }
  hold_idle(operation, std::chrono::milliseconds(0),
            [this, operation, load, flush = message.flush_cache] {
              if (flush) {
                ask_schedulers(operation, {.order = ipc::ScheduleOrder::kFlush, .wait = false},
                               load);
              } else {
                load();
              }
            });
}

void GenerationOperations::ask_for_weights(const OperationRef& operation,
                                           std::function<void()> next) {
  ask_workers(
      operation, ipc::MessageKind::kRankWeights, operation->weights,
      [operation = operation.get()](std::uint32_t rank, const ipc::Result<ipc::Envelope>& answer) {
        const auto done = answer
                              ? ipc::decode<ipc::RankWeightsReply>(answer->body, "RankWeightsReply")
                              : ipc::Result<ipc::RankWeightsReply>(answer.error());
        ipc::RankUpdate& update = operation->updates[rank];
        if (!done) {
          update.error = in_rank(done.error(), operation->engine->name(), ipc::Rank{rank});
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
  operation->prepares = true;
  ask_for_weights(operation, [this, operation, empty_cache] {
    operation->prepares = false;
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
  operation->weights.phase = ipc::WeightsPhase::kCommit;
  operation->weights.deadline = std::chrono::milliseconds(kCommitTime);
  operation->give_up = ipc::MonotonicClock::now() + 2 * kCommitTime;
  ask_for_weights(operation, [this, operation, empty_cache] {
    operation->commits = false;
    operation->engine->set_mixed_weights(operation->error);
    if (operation->error) {
      // Some ranks have the new weights and some may not: nothing computes until all agree.
      if (!operation->engine->paused()) {
        operation->engine->set_paused(ipc::PauseMode::kRetract);
      }
      give_up(operation);
    } else if (empty_cache) {
      empty_workers(operation, ipc::EmptyReason::kUpdate,
                    [this, operation] { run_again(operation); });
    } else {
      run_again(operation);  // The ranks' reports came before their answers: keys have followed.
    }
  });
}

}  // namespace kvferry::cache_manager
