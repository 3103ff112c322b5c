// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Release and resume of an engine's device memory: weights and scratch memory by the ranks'
// workers, the cache by a clear and a re-init.
#include "manager/generation_operations.hpp"
#include "manager/generation_rounds.hpp"
#include "manager/rank_errors.hpp"

#include <utility>

namespace kvferry::cache_manager {

using ipc::MemoryTag;

ipc::Status GenerationOperations::check_release(const EngineRecord& engine, ipc::MemoryTags tags) {
  if (engine.ranks().empty()) {
    return KVFERRY_ERROR(kNotReady, "engine {} has no worker that could release anything: start it",
                         engine.name());
  }
  for (std::uint32_t rank = 0; rank < engine.ranks().size(); ++rank) {
    const std::optional<RankPeer>& worker = engine.ranks()[rank].worker;
    const RankPeer* owner = engine.owner(rank);
    const bool has_owner = owner != nullptr && owner->connected && !owner->state.session.is_zero();
    if (!worker || !worker->connected || (tags.has(MemoryTag::kKvCache) && !has_owner)) {
      return KVFERRY_ERROR(
          kNotReady,
          "engine {} rank {}: its {} is not there, nothing was released: start it, or "
          "retry when it has reported",
          engine.name(), rank,
          worker && worker->connected ? ipc::to_string(engine.config()->cache_owner) : "worker");
    }
  }
  return ipc::ok();
}

template <typename Order>
void GenerationOperations::ask_for_memory(const OperationRef& operation,
                                          ipc::MessageKind kind,
                                          const Order& order,
                                          std::function<void()> next) {
  const auto ranks = static_cast<std::uint32_t>(operation->engine->ranks().size());
  operation->memory.resize(ranks);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    operation->memory[rank].rank = ipc::Rank{rank};
  }
  ask_workers(
      operation, kind, order,
      [operation = operation.get()](std::uint32_t rank, const ipc::Result<ipc::Envelope>& answer) {
        auto done = answer ? ipc::decode<ipc::RankReleaseReply>(answer->body, "RankReleaseReply")
                           : ipc::Result<ipc::RankReleaseReply>(answer.error());
        ipc::RankReleased& memory = operation->memory[rank];
        if (done) {
          memory.outcome = *done;
        } else {
          memory.error = in_rank(done.error(), operation->engine->name(), ipc::Rank{rank});
        }
      },
      std::move(next));
}

// ---- release ----

void GenerationOperations::release(const ipc::Peer& peer,
                                   const ipc::Envelope& request,
                                   const ipc::ReleaseRequest& message,
                                   EngineRecord& engine) {
  const OperationRef operation =
      begin(peer, request, engine, EngineOperation::kRelease, message.timeout + message.deadline);
  operation->once_idle = message.deadline;
  operation->reply = [this, &released = *operation] {
    answer(released,
           ipc::ReleaseReply{released.engine->released(), released.memory, released.cleared,
                             released.host_blocks_dropped, took(released)});
  };
  hold_idle(operation, message.timeout, [this, operation, message] {
    // Who was there may have gone while the engine was waited for; nothing is forgotten yet.
    if (const auto ready = check_release(*operation->engine, message.tags); !ready) {
      operation->error = ready.error();
      give_up(operation);
      return;
    }
    if (!message.tags.has(MemoryTag::kKvCache)) {
      release_held(operation, message);
      return;
    }
    // What its blocks hold is forgotten first.
    ask_schedulers(operation, {.order = ipc::ScheduleOrder::kFlush, .wait = false},
                   [this, operation, message] { release_held(operation, message); });
  });
}

// A pause outlives this manager, the hold of an idle engine does not: nobody is to compute without
// what is released.
void GenerationOperations::release_held(const OperationRef& operation,
                                        const ipc::ReleaseRequest& message) {
  if (operation->error) {
    give_up(operation);
  } else if (operation->engine->paused()) {
    release_ranks(operation, message);
  } else {
    const ipc::Schedule hold{.order = ipc::ScheduleOrder::kRetract, .for_release = true};
    ask_schedulers(operation, hold, [this, operation, message] {
      if (operation->error) {
        give_up(operation);
        return;
      }
      operation->engine->pause_for_release();
      release_ranks(operation, message);
    });
  }
}

// The cache last: its clear empties the allocators once, of all that was given up; whoever had
// nothing mapped is asked apart.
void GenerationOperations::release_ranks(const OperationRef& operation,
                                         const ipc::ReleaseRequest& message) {
  operation->commits = true;
  const bool with_cache = message.tags.has(MemoryTag::kKvCache);
  const ipc::MemoryTags beside = message.tags - ipc::MemoryTags{MemoryTag::kKvCache};
  if (beside.empty()) {
    release_cache(operation, message);
    return;
  }
  const ipc::RankRelease order{
      .tags = beside, .backup = message.backup, .empty = !with_cache, .deadline = message.deadline};
  ask_for_memory(operation, ipc::MessageKind::kRankRelease, order,
                 [this, operation, message, with_cache] {
                   if (!with_cache) {
                     end_release(operation);
                   } else if (!operation->error) {
                     release_cache(operation, message);
                   } else {
                     empty_workers(operation, ipc::EmptyReason::kRelease,
                                   [this, operation] { end_release(operation); });
                   }
                 });
}

void GenerationOperations::release_cache(const OperationRef& operation,
                                         const ipc::ReleaseRequest& message) {
  ClearScope scope;
  scope.engines.push_back(operation->engine);
  clears_.start({.by = operation->peer, .host = message.host, .deadline = message.deadline},
                std::move(scope), [this, operation](const ClearOperations::Outcome& outcome) {
                  if (operation->answered) return;
                  operation->cleared = outcome.reply.ranks;
                  operation->host_blocks_dropped = outcome.reply.host_blocks_dropped;
                  if (outcome.failed) operation->error = outcome.failed;
                  if (operation->engine->phase() != ipc::CachePhase::kReady) {
                    operation->engine->note_cache_released();
                  }
                  // The manager ends, and the ranks go on: whoever comes next finds it paused.
                  if (outcome.cancelled) return;
                  // A worker that had nothing mapped was not told to clear: one that was replaced
                  // while the cache was cleared, say.
                  empty_other_workers(operation, outcome.told, ipc::EmptyReason::kRelease,
                                      [this, operation] { end_release(operation); });
                });
}

void GenerationOperations::end_release(const OperationRef& operation) {
  EngineRecord& engine = *operation->engine;
  if (!operation->error) {
    run_again(operation);  // That is, held by the pause.
    return;
  }
  if (engine.release_pause_may_end()) {
    engine.end_release_pause();  // It lacks nothing.
  }
  give_up(operation);
}

// ---- resume ----

void GenerationOperations::take_back(const ipc::Peer& peer,
                                     const ipc::Envelope& request,
                                     const ipc::ResumeRequest& message,
                                     EngineRecord& engine) {
  const OperationRef operation =
      begin(peer, request, engine, EngineOperation::kResume, message.deadline);
  operation->commits = true;
  operation->tags = message.tags.empty() ? engine.released() : message.tags;
  operation->reply = [this, &resumed = *operation] {
    const EngineRecord& record = *resumed.engine;
    answer(resumed,
           ipc::ResumeReply{resumed.tags, record.released(), record.weights_lost(), resumed.memory,
                            record.generation(), record.paused(), took(resumed)});
  };
  const ipc::MemoryTags beside = operation->tags - ipc::MemoryTags{MemoryTag::kKvCache};
  if (beside.empty()) {
    take_cache_back(operation, message.deadline);
    return;
  }
  ask_for_memory(operation, ipc::MessageKind::kRankResume,
                 ipc::RankResume{.tags = beside, .deadline = message.deadline},
                 [this, operation, deadline = message.deadline] {
                   if (operation->error) {
                     finish(operation);  // What is back is back, the rest can be asked for again.
                   } else {
                     take_cache_back(operation, deadline);
                   }
                 });
}

// After the weights, which need their room as a whole.
void GenerationOperations::take_cache_back(const OperationRef& operation,
                                           std::chrono::milliseconds deadline) {
  EngineRecord& engine = *operation->engine;
  if (!operation->tags.has(MemoryTag::kKvCache) || engine.phase() == ipc::CachePhase::kReady) {
    end_resume(operation);
    return;
  }
  if (const ipc::Status status = reinits_.check(engine); !status) {
    operation->error = status.error();
    finish(operation);
    return;
  }
  reinits_.start({.by = operation->peer, .gpu_blocks = 0, .deadline = deadline}, engine,
                 [this, operation](const ipc::Result<ipc::ReinitReply>& outcome) {
                   if (operation->answered) return;
                   if (outcome) {
                     end_resume(operation);
                   } else {
                     operation->error = outcome.error();
                     finish(operation);
                   }
                 });
}

void GenerationOperations::end_resume(const OperationRef& operation) {
  const EngineRecord& engine = *operation->engine;
  if (engine.release_pause_may_end()) {
    let_run(operation);
  } else {
    finish(operation);
  }
}

}  // namespace kvferry::cache_manager
