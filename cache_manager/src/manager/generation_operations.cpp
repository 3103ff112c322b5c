// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/generation_operations.hpp"

#include "manager/generation_rounds.hpp"
#include "manager/rank_errors.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// For a scheduler that is told what it should know already.
constexpr std::chrono::seconds kTellTime{15};
constexpr std::chrono::milliseconds kTellAgain{200};

void add(ipc::SchedulerLoad& sum, const ipc::SchedulerLoad& one) {
  sum.running += one.running;
  sum.frozen += one.frozen;
  sum.waiting += one.waiting;
  sum.transfers += one.transfers;
}

/// Where ranks need each other, one's failure makes others fail: the higher, the less it says why.
/// Deaths are the kernel's word; without an error the highest.
int consequence(const std::optional<ipc::Error>& error) {
  if (!error) return 3;
  if (error->code == ipc::ErrorCode::kCancelled) return 2;
  return error->code == ipc::ErrorCode::kPeerDied ? 0 : 1;
}

}  // namespace

ipc::ScheduleOrder GenerationOperations::order_of(std::optional<ipc::PauseMode> paused) {
  if (!paused) {
    return ipc::ScheduleOrder::kRun;
  }
  switch (*paused) {
    case ipc::PauseMode::kAbort: return ipc::ScheduleOrder::kAbort;
    case ipc::PauseMode::kRetract: return ipc::ScheduleOrder::kRetract;
    case ipc::PauseMode::kInPlace: return ipc::ScheduleOrder::kInPlace;
  }
  return ipc::ScheduleOrder::kRun;
}

ipc::Schedule GenerationOperations::schedule_of(const EngineRecord& engine) {
  return {.order = order_of(engine.paused()), .for_release = engine.paused_by_release()};
}

GenerationOperations::OperationRef GenerationOperations::begin(const ipc::Peer& peer,
                                                               const ipc::Envelope& request,
                                                               EngineRecord& engine,
                                                               EngineOperation kind,
                                                               ipc::Duration deadline) {
  ipc::log_info("engine {}: {} starts, asked by {}", engine.name(), to_string(kind), peer.name);
  auto operation = std::make_shared<Operation>();
  operation->peer = peer;
  operation->request = request;
  operation->engine = &engine;
  operation->start = ipc::MonotonicClock::now();
  operation->give_up = operation->start + deadline;
  operations_.push_back(operation);
  engine.begin(kind);
  return operation;
}

// ---- pause, continue, flush ----

void GenerationOperations::pause(const ipc::Peer& peer,
                                 const ipc::Envelope& request,
                                 const ipc::PauseRequest& message,
                                 EngineRecord& engine) {
  const OperationRef operation =
      begin(peer, request, engine, EngineOperation::kPause, message.deadline);
  // From here on: a scheduler that comes later is told, and one that is slow takes it as told.
  engine.set_paused(message.mode);
  operation->reply = [this, &asked = *operation] {
    answer(asked, ipc::PauseReply{asked.schedulers, asked.load, took(asked)});
  };
  ask_schedulers(operation, {.order = order_of(message.mode)},
                 [this, operation] { finish(operation); });
}

void GenerationOperations::resume(const ipc::Peer& peer,
                                  const ipc::Envelope& request,
                                  const ipc::ContinueRequest& message,
                                  EngineRecord& engine) {
  const OperationRef operation =
      begin(peer, request, engine, EngineOperation::kContinue, message.deadline);
  operation->reply = [this, &resumed = *operation] {
    answer(resumed, ipc::ContinueReply{resumed.ranks, took(resumed)});
  };
  const auto run = [this, operation] {
    if (operation->error) {
      finish(operation);  // Still paused: it can be asked for again.
      return;
    }
    let_run(operation);
  };
  if (message.empty_cache) {
    empty_workers(operation, ipc::EmptyReason::kContinue, run);
  } else {
    run();
  }
}

void GenerationOperations::let_run(const OperationRef& operation) {
  ask_schedulers(operation, {.order = ipc::ScheduleOrder::kRun}, [this, operation] {
    // One that did not answer may be held: the engine stays paused, so that it can be repeated.
    if (!operation->error) {
      if (operation->engine->operation() == EngineOperation::kResume) {
        operation->engine->end_release_pause();
      } else {
        operation->engine->set_paused(std::nullopt);
      }
      order_back(*operation->engine);  // One that came meanwhile was told that it is paused.
    }
    finish(operation);
  });
}

void GenerationOperations::flush(const ipc::Peer& peer,
                                 const ipc::Envelope& request,
                                 const ipc::FlushRequest& message,
                                 EngineRecord& engine) {
  const OperationRef operation =
      begin(peer, request, engine, EngineOperation::kFlush, message.timeout + message.deadline);
  operation->once_idle = message.deadline;
  operation->reply = [this, &flushed = *operation] {
    answer(flushed, ipc::FlushReply{flushed.ranks, flushed.host_blocks_dropped, took(flushed)});
  };
  hold_idle(operation, message.timeout, [this, operation, message] {
    ask_schedulers(operation, {.order = ipc::ScheduleOrder::kFlush, .wait = false},
                   [this, operation, message] { flush_held(operation, message); });
  });
}

// Nothing is changed before everybody is idle: schedulers are held one by one as they are, then the
// jobs are looked at that no scheduler knows of.
void GenerationOperations::hold_idle(const OperationRef& operation,
                                     std::chrono::milliseconds timeout,
                                     std::function<void()> then) {
  const bool wait = timeout.count() > 0;
  if (wait) {
    ipc::log_info("engine {}: {} waits at most {} ms for it to be idle", operation->engine->name(),
                  to_string(operation->engine->operation()), timeout.count());
    operation->timer =
        context_.loop.after(timeout, [this, operation] { idle_times_out(operation); });
  }
  ask_schedulers(operation, {.order = ipc::ScheduleOrder::kIdle, .wait = wait},
                 [this, operation, then = std::move(then)] {
                   if (operation->error) {
                     give_up(operation);
                     return;
                   }
                   operation->next = then;
                   operation->waits_for_jobs = operation->timer != 0;
                   wait_for_jobs(operation);
                 });
}

// The schedulers are idle and held; jobs whose client has gone may still copy.
void GenerationOperations::wait_for_jobs(const OperationRef& operation) {
  const std::size_t unfinished = context_.jobs.unfinished(operation->engine->id());
  if (unfinished == 0) {
    operation->waits_for_jobs = false;
    context_.loop.cancel(std::exchange(operation->timer, 0));
    if (operation->once_idle) {
      operation->give_up =
          std::min(operation->give_up, ipc::MonotonicClock::now() + *operation->once_idle);
    }
    std::exchange(operation->next, nullptr)();
  } else if (!operation->waits_for_jobs) {
    operation->error = KVFERRY_ERROR(
        kNotIdle,
        "not idle: {} transfers of engine {} are in flight at the manager; nothing was changed. "
        "Give it time",
        unfinished, operation->engine->name());
    give_up(operation);
  }
}

void GenerationOperations::idle_times_out(const OperationRef& operation) {
  operation->timer = 0;
  if (operation->answered) {
    return;
  }
  if (std::exchange(operation->waits_for_jobs, false)) {
    wait_for_jobs(operation);
    return;
  }
  // Those that still wait answer, with what keeps them from being idle, when they are told not to
  // wait any longer. One whose answer is on its way stays held.
  for (const ipc::IncarnationId& scheduler : operation->open) {
    tell(scheduler, {.order = ipc::ScheduleOrder::kIdle, .wait = false});
  }
}

void GenerationOperations::flush_held(const OperationRef& operation,
                                      const ipc::FlushRequest& message) {
  if (operation->error) {
    give_up(operation);
    return;
  }
  if (message.host == ipc::HostPolicy::kDrop) {
    operation->host_blocks_dropped = context_.host.drop_prefixes(*operation->engine);
  }
  const auto run = [this, operation] { run_again(operation); };
  if (message.empty_cache) {
    empty_workers(operation, ipc::EmptyReason::kFlush, run);
  } else {
    run();
  }
}

void GenerationOperations::run_again(const OperationRef& operation) {
  ask_schedulers(operation, schedule_of(*operation->engine),
                 [this, operation] { finish(operation); });
}

void GenerationOperations::give_up(const OperationRef& operation) {
  order_back(*operation->engine);
  finish(operation);
}

// ---- rounds ----

void GenerationOperations::ask_schedulers(const OperationRef& operation,
                                          const ipc::Schedule& order,
                                          std::function<void()> next) {
  operation->next = std::move(next);
  operation->pending = 1;  // Held until everything is sent.
  operation->load = {};
  operation->schedulers = 0;
  operation->open.clear();
  for (const ClientRecord* client : context_.directory.clients_of(*operation->engine)) {
    const bool came_later = operation->asked && !operation->asked->contains(client->peer.id);
    if (!client->schedules || came_later) {
      continue;
    }
    operation->open.push_back(client->peer.id);
  }
  if (!operation->asked) {
    operation->asked.emplace(operation->open.begin(), operation->open.end());
  }
  for (const ipc::IncarnationId& scheduler : std::vector(operation->open)) {
    ++operation->pending;
    ++operation->schedulers;
    context_.calls.call(scheduler, ipc::MessageKind::kSchedule, order,
                        ipc::Deadline::at(operation->give_up),
                        [this, operation, scheduler](const ipc::Result<ipc::Envelope>& answer) {
                          on_schedule_answer(operation, scheduler, answer);
                        });
  }
  end_round(operation);
}

void GenerationOperations::on_schedule_answer(const OperationRef& operation,
                                              const ipc::IncarnationId& scheduler,
                                              const ipc::Result<ipc::Envelope>& answer) {
  if (operation->answered) {
    return;
  }
  std::erase(operation->open, scheduler);
  const auto load = answer ? ipc::decode<ipc::SchedulerLoad>(answer->body, "SchedulerLoad")
                           : ipc::Result<ipc::SchedulerLoad>(answer.error());
  if (load) {
    add(operation->load, *load);
  } else if (load.error().code == ipc::ErrorCode::kPeerDied) {
    // Its requests ended with it.
    ipc::log_warn("engine {}: a scheduler is gone, the others are asked on",
                  operation->engine->name());
    --operation->schedulers;
  } else if (!operation->error) {
    const ClientRecord* client = context_.directory.client(scheduler);
    operation->error = load.error();
    operation->error->message = fmt::format(
        "engine {}: scheduler {} (pid {}): {}", operation->engine->name(),
        client == nullptr ? scheduler.hex() : client->peer.name,
        client == nullptr ? 0 : client->peer.pid,
        load.error().code == ipc::ErrorCode::kTimeout
            ? std::string("it has not done what it was told by the deadline; it is told all the "
                          "same: look at its log, or ask again")
            : load.error().message);
  }
  end_round(operation);
}

void GenerationOperations::empty_workers(const OperationRef& operation,
                                         ipc::EmptyReason reason,
                                         std::function<void()> next) {
  empty_other_workers(operation, {}, reason, std::move(next));
}

void GenerationOperations::empty_other_workers(const OperationRef& operation,
                                               const std::set<ipc::IncarnationId>& emptied,
                                               ipc::EmptyReason reason,
                                               std::function<void()> next) {
  const auto ranks = static_cast<std::uint32_t>(operation->engine->ranks().size());
  operation->ranks.resize(ranks);
  const RankAnswered note = [operation = operation.get()](
                                std::uint32_t rank, const ipc::Result<ipc::Envelope>& answer) {
    auto memory = answer ? ipc::decode<ipc::AllocatorMemory>(answer->body, "AllocatorMemory")
                         : ipc::Result<ipc::AllocatorMemory>(answer.error());
    ipc::RankMemory& seen = operation->ranks[rank];
    if (memory) {
      seen.memory = *memory;
    } else if (memory.error().code == ipc::ErrorCode::kPeerDied) {
      seen.absent = true;  // No process, no cache.
    } else {
      seen.error = in_rank(memory.error(), operation->engine->name(), ipc::Rank{rank});
    }
  };
  operation->next = std::move(next);
  operation->pending = 1;  // Held until everything is sent.
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    operation->ranks[rank].rank = ipc::Rank{rank};
    const std::optional<RankPeer>& worker = operation->engine->ranks()[rank].worker;
    if (worker && emptied.contains(worker->id)) {
      continue;
    }
    ask_rank(operation, rank, ipc::MessageKind::kRankEmpty, ipc::RankEmpty{reason}, note);
  }
  end_round(operation);
}

void GenerationOperations::end_round(const OperationRef& operation) {
  if (--operation->pending > 0) {
    return;
  }
  // The first of those that tell most.
  const auto note_first_of = [&operation](const auto& ranks) {
    const auto failed =
        std::min_element(ranks.begin(), ranks.end(), [](const auto& one, const auto& other) {
          return consequence(one.error) < consequence(other.error);
        });
    if (failed != ranks.end() && !operation->error) {
      operation->error = failed->error;
    }
  };
  note_first_of(operation->updates);
  note_first_of(operation->memory);
  note_first_of(operation->ranks);
  std::exchange(operation->next, nullptr)();
}

// ---- one scheduler ----

void GenerationOperations::tell(const ipc::IncarnationId& scheduler, const ipc::Schedule& order) {
  tell(scheduler, order, ipc::Deadline::after(kTellTime));
}

// What it is told has to reach it: a full queue is tried again.
void GenerationOperations::tell(const ipc::IncarnationId& scheduler,
                                const ipc::Schedule& order,
                                ipc::Deadline deadline) {
  context_.calls.call(
      scheduler, ipc::MessageKind::kSchedule, order, deadline,
      [this, scheduler, deadline](const ipc::Result<ipc::Envelope>& answer) {
        if (answer || answer.error().code == ipc::ErrorCode::kCancelled ||
            answer.error().code == ipc::ErrorCode::kNotIdle) {
          return;
        }
        if (answer.error().code == ipc::ErrorCode::kBusy && !deadline.expired() &&
            !context_.stopping) {
          context_.loop.after(kTellAgain,
                              [this, scheduler, deadline] { tell_again(scheduler, deadline); });
          return;
        }
        ipc::log_warn("scheduler {}: {}", scheduler.hex(), answer.error().to_string());
      });
}

// What holds by now, which may be another order; while an operation runs its own rounds tell.
void GenerationOperations::tell_again(const ipc::IncarnationId& scheduler, ipc::Deadline deadline) {
  const ClientRecord* client = context_.directory.client(scheduler);
  if (client != nullptr && client->engine->operation() == EngineOperation::kNone) {
    tell(scheduler, schedule_of(*client->engine), deadline);
  }
}

void GenerationOperations::order_back(const EngineRecord& engine) {
  for (const ClientRecord* client : context_.directory.clients_of(engine)) {
    if (client->schedules) {
      tell(client->peer.id, schedule_of(engine));
    }
  }
}

void GenerationOperations::on_scheduler(const ClientRecord& client,
                                        std::optional<ipc::PauseMode> paused,
                                        bool by_release) {
  const std::optional<ipc::PauseMode> before = client.engine->paused();
  const bool before_by_release = client.engine->paused_by_release();
  client.engine->adopt_pause(paused, by_release);
  if (client.engine->paused() != before ||
      client.engine->paused_by_release() != before_by_release) {
    for (const ClientRecord* other : context_.directory.clients_of(*client.engine)) {
      if (other->schedules && other->peer.id != client.peer.id) {
        tell(other->peer.id, schedule_of(*client.engine));  // It came first.
      }
    }
  } else if (client.engine->paused() != paused ||
             (paused && client.engine->paused_by_release() != by_release)) {
    tell(client.peer.id, schedule_of(*client.engine));
  }
}

void GenerationOperations::on_jobs_changed() {
  const std::vector<OperationRef> operations = operations_;
  for (const OperationRef& operation : operations) {
    if (operation->waits_for_jobs) {
      wait_for_jobs(operation);
    }
  }
}

// ---- the end ----

void GenerationOperations::finish(const OperationRef& operation) {
  operation->answered = true;
  operation->next = nullptr;  // It holds the operation.
  context_.loop.cancel(std::exchange(operation->timer, 0));
  EngineRecord& engine = *operation->engine;
  if (operation->error) {
    ipc::log_warn("engine {}: {} failed: {}", engine.name(), to_string(engine.operation()),
                  operation->error->to_string());
  } else {
    ipc::log_info("engine {}: {} done after {} ms", engine.name(), to_string(engine.operation()),
                  took(*operation).count() / 1000);
  }
  engine.end_operation(!operation->error.has_value());
  std::erase(operations_, operation);
  operation->reply();
  context_.loop.post(context_.operation_ended);
  const std::string name = engine.name();
  context_.drop_if_unused(name);
}

void GenerationOperations::cancel(EngineRecord& engine, const ipc::Error& why) {
  const OperationRef operation = find(engine);
  if (operation == nullptr) {
    return;
  }
  if (operation->commits) {
    return;
  }
  if (!operation->workers.empty()) {
    abandon_weights(*operation);
  }
  const bool may_hold = holds_while_it_runs(engine.operation());
  end_early(operation, why);
  if (may_hold) {
    order_back(engine);
  }
}

void GenerationOperations::end_early(const OperationRef& operation, const ipc::Error& why) {
  operation->error = why;
  operation->answered = true;
  operation->next = nullptr;  // It holds the operation.
  context_.loop.cancel(std::exchange(operation->timer, 0));
  operation->engine->end_operation(false);
  std::erase(operations_, operation);
  context_.refuse(operation->peer, operation->request, why);
  context_.loop.post(context_.operation_ended);
}

void GenerationOperations::on_peer_gone(const ipc::IncarnationId& peer) {
  const std::vector<OperationRef> operations = operations_;
  for (const OperationRef& operation : operations) {
    // What has begun goes on to its end; what only waits is nobody's wish any more.
    if (operation->peer.id == peer && operation->timer != 0) {
      cancel(*operation->engine, KVFERRY_ERROR(kCancelled, "who asked for it has gone"));
    }
  }
}

void GenerationOperations::cancel_all(const ipc::Error& why) {
  const std::vector<OperationRef> operations = operations_;
  for (const OperationRef& operation : operations) {
    cancel(*operation->engine, why);
    // What the ranks have begun they finish: only this manager does not wait for it.
    if (!operation->answered) {
      end_early(operation, why);
    }
  }
}

GenerationOperations::OperationRef GenerationOperations::find(const EngineRecord& engine) const {
  const auto found = std::find_if(
      operations_.begin(), operations_.end(),
      [&engine](const OperationRef& operation) { return operation->engine == &engine; });
  return found == operations_.end() ? nullptr : *found;
}

std::chrono::microseconds GenerationOperations::took(const Operation& operation) {
  return std::chrono::duration_cast<std::chrono::microseconds>(ipc::MonotonicClock::now() -
                                                               operation.start);
}

}  // namespace kvferry::cache_manager
