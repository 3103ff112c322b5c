// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/reinit_operations.hpp"

#include "kvferry/ipc/transitions/mutants.hpp"
#include "manager/rank_errors.hpp"

#include <string_view>
#include <utility>

namespace kvferry::cache_manager {
namespace {

ipc::Transition answer_of(bool ready) {
  return ready ? ipc::Transition::kManagerSeesReady : ipc::Transition::kManagerGivesUp;
}

}  // namespace

void ReinitOperations::record(ipc::Transition transition,
                              const Reinit& reinit,
                              const ipc::RankReinit& order,
                              const ipc::IncarnationId& peer,
                              std::uint64_t detail) const {
  context_.transitions.record(transition, {.session = order.session,
                                           .epoch = order.epoch,
                                           .lease = reinit.operation,
                                           .peer = peer,
                                           .detail = detail});
}

ipc::Status ReinitOperations::check(const EngineRecord& engine) const {
  if (context_.stopping) {
    return KVFERRY_ERROR(kNotReady, "the manager is ending");
  }
  if (engine.ranks().empty()) {
    return KVFERRY_ERROR(kNotReady, "engine {} has no worker and no mover: start them",
                         engine.name());
  }
  bool all_ready = true;
  for (std::uint32_t rank = 0; rank < engine.ranks().size(); ++rank) {
    all_ready = all_ready && engine.rank_ready(rank);
    const RankPeer* owner = engine.owner(rank);
    if (owner == nullptr || owner->state.session.is_zero() || !engine.ranks()[rank].worker) {
      return KVFERRY_ERROR(
          kNotReady, "engine {} rank {}: its {} is not there: start it, then reinit", engine.name(),
          rank,
          engine.ranks()[rank].worker ? ipc::to_string(engine.config()->cache_owner)
                                      : std::string_view("worker"));
    }
  }
  if (all_ready) {
    return KVFERRY_ERROR(kBusy, "engine {} is already mapped on every rank; clear it first",
                         engine.name());
  }
  return ipc::ok();
}

void ReinitOperations::start(const Order& wanted, EngineRecord& engine, Done done) {
  ipc::log_info("engine {}: reinit starts, asked by {}", engine.name(), wanted.by.name);
  auto reinit = std::make_shared<Reinit>();
  reinit->by = wanted.by;
  reinit->done = std::move(done);
  reinit->operation = {++context_.operations.value};
  reinit->start = ipc::MonotonicClock::now();
  reinit->give_up = reinit->start + wanted.deadline + margin_;
  reinit->engine = &engine;
  reinits_.push_back(reinit);
  if (engine.operation() == EngineOperation::kNone) engine.begin(EngineOperation::kReinit);
  reinit->pending = 1;  // Held until everything is sent.
  for (std::uint32_t rank = 0; rank < engine.ranks().size(); ++rank) {
    if (engine.rank_ready(rank)) {
      continue;
    }
    const RankPeer& owner = *engine.owner(rank);
    const bool allocated = owner.state.phase == ipc::LeasePhase::kReady;
    ipc::RankReinit order;
    order.session = owner.state.session;
    order.epoch = ipc::Epoch{owner.state.epoch.value + (allocated ? 0U : 1U)};
    order.gpu_blocks = wanted.gpu_blocks;
    order.deadline = wanted.deadline;
    if (allocated) {
      reinit_attacher(reinit, rank, order);
    } else {
      reinit_owner(reinit, rank, owner.id, order);
    }
  }
  if (--reinit->pending == 0) {
    finish_reinit(reinit);
  }
}

void ReinitOperations::reinit_owner(const ReinitRef& reinit,
                                    std::uint32_t rank,
                                    const ipc::IncarnationId& owner,
                                    const ipc::RankReinit& order) {
  ++reinit->pending;
  record(ipc::Transition::kManagerReinit, *reinit, order, owner, 1);
  context_.calls.call(
      owner, ipc::MessageKind::kRankReinit, order, ipc::Deadline::at(reinit->give_up),
      [this, reinit, rank, order, peer = owner](const ipc::Result<ipc::Envelope>& answer) {
        if (reinit->answered) {
          return;
        }
        record(answer_of(answer.has_value()), *reinit, order, peer);
        if (answer) {
          // Only now: an attacher that waits for an arena that could not be made
          // would be deaf to everything else until its deadline.
          reinit_attacher(reinit, rank, order);
        } else if (!reinit->error) {
          reinit->error = in_rank(answer.error(), reinit->engine->name(), ipc::Rank{rank});
        }
        if (--reinit->pending == 0) {
          finish_reinit(reinit);
        }
      });
}

void ReinitOperations::reinit_attacher(const ReinitRef& reinit,
                                       std::uint32_t rank,
                                       const ipc::RankReinit& order) {
  const EngineRecord& engine = *reinit->engine;
  if (rank >= engine.ranks().size() || engine.attacher(rank) == nullptr) {
    return;
  }
  const bool is_mover = engine.config()->cache_owner == ipc::CacheOwner::kWorker;
  ++reinit->pending;
  const ipc::IncarnationId attacher = engine.attacher(rank)->id;
  record(ipc::Transition::kManagerReinit, *reinit, order, attacher, is_mover ? 0 : 1);
  context_.calls.call(
      attacher, ipc::MessageKind::kRankReinit, order, ipc::Deadline::at(reinit->give_up),
      [this, reinit, rank, order, attacher, is_mover](const ipc::Result<ipc::Envelope>& answer) {
        if (reinit->answered) {
          return;
        }
        record(answer_of(answer.has_value()), *reinit, order, attacher);
        if (!answer && is_mover && is_gone(answer.error().code)) {
          // The workers serve on without offload until another mover has attached.
          ipc::log_warn("engine {} rank {}: its mover is gone, reinit goes on without",
                        reinit->engine->name(), rank);
        } else if (!answer && !reinit->error && !ipc::is_mutant("tells_ready_without_a_worker")) {
          reinit->error = in_rank(answer.error(), reinit->engine->name(), ipc::Rank{rank});
        }
        if (--reinit->pending == 0) {
          finish_reinit(reinit);
        }
      });
}

void ReinitOperations::on_engine_changed(const EngineRecord& engine) {
  const std::vector<ReinitRef> reinits = reinits_;
  for (const ReinitRef& reinit : reinits) {
    if (reinit->waits_for_ready && reinit->engine == &engine &&
        engine.phase() == ipc::CachePhase::kReady) {
      finish_reinit(reinit);
    }
  }
}

void ReinitOperations::finish_reinit(const ReinitRef& reinit) {
  EngineRecord& engine = *reinit->engine;
  const bool ready =
      engine.phase() == ipc::CachePhase::kReady || ipc::is_mutant("tells_ready_without_a_worker");
  if (!reinit->error && !ready) {
    if (ipc::MonotonicClock::now() < reinit->give_up) {
      reinit->waits_for_ready = true;
      reinit->timer = context_.loop.at(reinit->give_up, [this, reinit] {
        if (!reinit->answered) {
          finish_reinit(reinit);
        }
      });
      return;
    }
    reinit->error = KVFERRY_ERROR(kTimeout,
                                  "engine {}: all ranks answered the reinit, but not all report "
                                  "their arena as mapped",
                                  engine.name());
  }
  reinit->answered = true;
  context_.loop.cancel(reinit->timer);
  std::erase(reinits_, reinit);
  if (engine.operation() == EngineOperation::kReinit) {
    engine.end_operation(/*succeeded=*/!reinit->error);
  } else if (!reinit->error) {
    engine.count_reinit();
  }
  const Done done = std::exchange(reinit->done, nullptr);
  if (reinit->error) {
    ipc::log_warn("engine {}: reinit failed: {}", engine.name(), reinit->error->to_string());
    engine.set_note(reinit->error->message);
    context_.engine_changed(engine);
    done(*reinit->error);
    return;
  }
  context_.transitions.record(ipc::Transition::kManagerTellsReady,
                              {.lease = reinit->operation, .peer = reinit->by.id});
  ipc::ReinitReply reply;
  reply.generation = engine.generation();
  reply.took = std::chrono::duration_cast<std::chrono::microseconds>(ipc::MonotonicClock::now() -
                                                                     reinit->start);
  ipc::log_info("engine {}: reinit ends after {} ms, generation {}", engine.name(),
                reply.took.count() / 1000, reply.generation);
  done(reply);
}

void ReinitOperations::cancel_all(const ipc::Error& why) {
  const std::vector<ReinitRef> reinits = std::exchange(reinits_, {});
  for (const ReinitRef& reinit : reinits) {
    reinit->answered = true;
    context_.loop.cancel(reinit->timer);
    std::exchange(reinit->done, nullptr)(why);
  }
}

}  // namespace kvferry::cache_manager
