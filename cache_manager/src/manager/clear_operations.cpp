// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/clear_operations.hpp"

#include "kvferry/ipc/transitions/mutants.hpp"
#include "manager/rank_errors.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {
namespace {

constexpr std::chrono::milliseconds kAttacherGrace{2000};

}  // namespace

ipc::TransitionFields ClearOperations::step_of(const Asked& asked, std::uint64_t detail) {
  return {.session = asked.state.session,
          .epoch = asked.state.epoch,
          .lease = asked.operation,
          .peer = asked.peer,
          .detail = detail};
}

void ClearOperations::start(Order order, ClearScope scope, Done done) {
  auto clear = std::make_shared<Clear>();
  clear->order = std::move(order);
  clear->done = std::move(done);
  clear->operation = {++context_.operations.value};
  clear->start = ipc::MonotonicClock::now();
  clear->scope = std::move(scope);
  clears_.push_back(clear);
  clear->pending = 1;  // Held until everything is sent.
  add_unknown(*clear);
  for (EngineRecord* engine : clear->scope.engines) {
    start_clear(clear, *engine);
  }
  if (--clear->pending == 0) {
    finish_clear(clear);
  }
}

void ClearOperations::add_unknown(Clear& clear) {
  for (const UnknownOwner& owner : clear.scope.unknown_owners) {
    ClearRank& rank = clear.ranks.emplace_back();
    rank.engine = owner.engine;
    rank.rank = owner.rank;
    rank.error = in_rank(
        KVFERRY_ERROR(kNotReady,
                      "its cache owner (pid {}) lives and has not registered with this manager, "
                      "nothing was cleared: retry when status shows it, or end it",
                      owner.pid),
        owner.engine, owner.rank);
  }
}

void ClearOperations::start_clear(const ClearRef& clear, EngineRecord& engine) {
  ipc::log_info("engine {}: clear starts, asked by {}, host tier {}", engine.name(),
                clear->order.by.name,
                clear->order.host == ipc::HostPolicy::kDrop ? "dropped" : "kept");
  // Admission ends first; queued jobs end as revoked, what runs drains at the movers.
  if (engine.operation() == EngineOperation::kNone) {
    engine.begin(EngineOperation::kClear);
  } else {
    engine.begin_clear();
  }
  context_.jobs.fail_queued(engine.id(),
                            KVFERRY_ERROR(kRevoked, "engine {} is being cleared", engine.name()));
  context_.engine_changed(engine);
  if (engine.ranks().empty()) {
    // Known by its client alone, such as after this manager's start: whether its processes hold
    // memory, nobody here knows.
    ClearRank& unknown = clear->ranks.emplace_back();
    unknown.engine = engine.name();
    unknown.error =
        KVFERRY_ERROR(kNotReady,
                      "engine {}: no worker or mover has registered yet, nothing was cleared: "
                      "start them, or retry when they have",
                      engine.name());
  }
  for (std::uint32_t rank = 0; rank < engine.ranks().size(); ++rank) {
    const std::size_t index = clear->ranks.size();
    clear->ranks.push_back({.engine = engine.name(),
                            .rank = ipc::Rank{rank},
                            .outcome = {},
                            .error = {},
                            .attacher_note = {},
                            .attacher_free_before = 0,
                            .attacher_free_after = 0,
                            .open_attacher = {},
                            .attacher_failed = false,
                            .again = engine.is_cleared(rank)});
    const RankPeer* owner = engine.owner(rank);
    const RankPeer* attacher = engine.attacher(rank);
    if (owner == nullptr || owner->state.session.is_zero()) {
      clear->ranks[index].error =
          in_rank(KVFERRY_ERROR(kNotReady,
                                "its cache owner ({}) is not there: start it, or retry when it "
                                "has reported",
                                ipc::to_string(engine.config()->cache_owner)),
                  engine.name(), ipc::Rank{rank});
    } else if (owner->state.epoch.value == 0) {
      clear->ranks[index].outcome = ipc::RankClearReply{};
      clear->ranks[index].outcome->detail = "nothing was mapped";
    } else {
      send_clear(clear, index, *owner, /*is_owner=*/true);
    }
    if (attacher != nullptr && !attacher->state.session.is_zero() &&
        attacher->state.epoch.value != 0) {
      send_clear(clear, index, *attacher, /*is_owner=*/false);
    }
  }
}

void ClearOperations::send_clear(const ClearRef& clear,
                                 std::size_t index,
                                 const RankPeer& target,
                                 bool is_owner) {
  ipc::RankClear message;
  message.session = target.state.session;
  message.epoch = target.state.epoch;
  message.deadline = clear->order.deadline;
  const Asked asked{.peer = target.id,
                    .state = target.state,
                    .operation = clear->operation,
                    .is_owner = is_owner};
  ++clear->pending;
  clear->told.insert(target.id);
  context_.transitions.record(ipc::Transition::kManagerClear, step_of(asked, is_owner ? 1 : 0));
  if (!is_owner) {
    clear->ranks[index].open_attacher = asked;
  }
  context_.calls.call(target.id, ipc::MessageKind::kRankClear, message,
                      ipc::Deadline::after(clear->order.deadline + margin_),
                      [this, clear, index, asked](const ipc::Result<ipc::Envelope>& answer) {
                        on_clear_answer(clear, index, asked, answer);
                      });
}

void ClearOperations::on_clear_answer(const ClearRef& clear,
                                      std::size_t index,
                                      const Asked& asked,
                                      const ipc::Result<ipc::Envelope>& answer) {
  if (clear->answered) {
    return;
  }
  ClearRank& rank = clear->ranks[index];
  if (!asked.is_owner && !std::exchange(rank.open_attacher, std::nullopt)) {
    return;  // Too late: nobody waits for it any more.
  }
  ipc::Result<ipc::RankClearReply> reply =
      answer ? ipc::decode<ipc::RankClearReply>(answer->body, "RankClearReply")
             : ipc::Result<ipc::RankClearReply>(answer.error());
  if (reply && ipc::is_mutant("takes_quarantined_as_cleared")) reply->quarantined_bytes = 0;
  context_.transitions.record(
      reply ? ipc::Transition::kManagerSeesCleared : ipc::Transition::kManagerGivesUp,
      step_of(asked, reply ? reply->quarantined_bytes : 0));
  if (reply) {
    if (EngineRecord* engine = context_.directory.find(rank.engine)) {
      engine->note_cleared(rank.rank.value, asked.state.session, asked.state.epoch);
    }
    if (asked.is_owner) {
      rank.outcome = *reply;
      limit_attacher(clear, index);
    } else {
      rank.attacher_free_before = reply->free_before;
      rank.attacher_free_after = reply->free_after;
    }
  } else if (asked.is_owner && !ipc::is_mutant("tells_cleared_without_an_owner")) {
    rank.error = in_rank(reply.error(), rank.engine, rank.rank);
  } else if (!is_gone(reply.error().code) && reply.error().code != ipc::ErrorCode::kStaleEpoch) {
    // A dead attacher holds nothing, and one that has moved on has let go: the owner's answer says
    // what came of it. One that failed alive is reported.
    rank.attacher_failed = true;
    rank.attacher_note = reply.error().to_string();
  }
  if (--clear->pending == 0) {
    finish_clear(clear);
  }
}

void ClearOperations::limit_attacher(const ClearRef& clear, std::size_t index) {
  if (!clear->ranks[index].open_attacher) {
    return;
  }
  context_.loop.after(kAttacherGrace, [this, clear, index] {
    ClearRank& rank = clear->ranks[index];
    if (clear->answered || !rank.open_attacher) {
      return;
    }
    context_.transitions.record(ipc::Transition::kManagerGivesUp, step_of(*rank.open_attacher));
    rank.open_attacher.reset();
    rank.attacher_note = "no answer, the owner's counts";
    if (--clear->pending == 0) {
      finish_clear(clear);
    }
  });
}

// What each rank reached; the first error, which tells how many more there are.
std::optional<ipc::Error> ClearOperations::collect_outcomes(Clear& clear, ipc::ClearReply& reply) {
  std::optional<ipc::Error> first;
  std::size_t failed = 0;
  for (ClearRank& rank : clear.ranks) {
    ipc::RankOutcome outcome;
    outcome.engine = rank.engine;
    outcome.rank = rank.rank;
    outcome.again = rank.again;
    if (rank.outcome) {
      outcome.outcome = *rank.outcome;
      if (rank.attacher_free_before != 0) {
        outcome.outcome.free_before =
            std::min(outcome.outcome.free_before, rank.attacher_free_before);
      }
      outcome.outcome.free_after = std::max(outcome.outcome.free_after, rank.attacher_free_after);
      if (!rank.attacher_note.empty()) {
        outcome.outcome.detail += fmt::format(
            "{}attacher: {}", outcome.outcome.detail.empty() ? "" : "; ", rank.attacher_note);
      }
      if (rank.attacher_failed && outcome.outcome.kind == ipc::ClearKind::kCleared) {
        rank.error =
            in_rank(KVFERRY_ERROR(kTimeout, "{}", rank.attacher_note), rank.engine, rank.rank);
      }
    }
    outcome.error = rank.error;
    if (rank.error) {
      ++failed;
      first = first ? first : rank.error;
    }
    reply.ranks.push_back(std::move(outcome));
  }
  if (!first && clear.scope.blind) {
    first = KVFERRY_ERROR(kNotReady, "owners that have not registered cannot be looked for: {}",
                          clear.scope.blind->to_string());
  }
  if (failed > 1) {
    first->message += fmt::format(" (and {} more ranks)", failed - 1);
  }
  return first;
}

void ClearOperations::finish_clear(const ClearRef& clear) {
  clear->answered = true;
  Outcome outcome;
  outcome.told = std::move(clear->told);
  ipc::ClearReply& reply = outcome.reply;
  outcome.failed = collect_outcomes(*clear, reply);
  if (clear->order.host == ipc::HostPolicy::kDrop) {
    for (const std::string& departed : clear->scope.departed) {
      const std::uint64_t dropped = context_.host.drop_departed(departed);
      reply.host_blocks_dropped += dropped;
      ipc::log_info("engine {}: nobody is left, {} host blocks dropped", departed, dropped);
    }
  }
  for (EngineRecord* engine : clear->scope.engines) {
    // Whatever became of the ranks: no tier is left out because another one failed.
    if (clear->order.host == ipc::HostPolicy::kDrop) {
      reply.host_blocks_dropped += context_.host.drop_prefixes(*engine);
    }
    const bool all = std::none_of(clear->ranks.begin(), clear->ranks.end(), [&](const auto& rank) {
      return rank.engine == engine->name() && rank.error.has_value();
    });
    if (engine->operation() == EngineOperation::kClear) {
      engine->end_operation(/*succeeded=*/all);
    } else {
      engine->end_clear(/*succeeded=*/all);
    }
  }
  reply.took = std::chrono::duration_cast<std::chrono::microseconds>(ipc::MonotonicClock::now() -
                                                                     clear->start);
  for (EngineRecord* engine : clear->scope.engines) {
    ipc::log_info("engine {}: clear ends after {} ms, {} host blocks dropped", engine->name(),
                  reply.took.count() / 1000, reply.host_blocks_dropped);
    context_.engine_changed(*engine);
  }
  std::erase(clears_, clear);
  if (outcome.failed) {
    ipc::log_warn("clear failed: {}", outcome.failed->to_string());
  } else {
    context_.transitions.record(ipc::Transition::kManagerTellsCleared,
                                {.lease = clear->operation, .peer = clear->order.by.id});
  }
  std::exchange(clear->done, nullptr)(outcome);
}

void ClearOperations::cancel_all(const ipc::Error& why) {
  const std::vector<ClearRef> clears = std::exchange(clears_, {});
  for (const ClearRef& clear : clears) {
    clear->answered = true;
    std::exchange(clear->done,
                  nullptr)({.reply = {}, .failed = why, .cancelled = true, .told = {}});
  }
}

}  // namespace kvferry::cache_manager
