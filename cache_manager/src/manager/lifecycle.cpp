// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/lifecycle.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvferry::cache_manager {
namespace {

constexpr std::chrono::milliseconds kAnswerMargin{5000};
constexpr std::chrono::milliseconds kAttacherGrace{2000};
constexpr std::chrono::milliseconds kLongestDeadline{600'000};

bool is_gone(ipc::ErrorCode code) {
  return code == ipc::ErrorCode::kPeerDied || code == ipc::ErrorCode::kNotFound;
}

ipc::Error in_rank(const ipc::Error& error, const std::string& engine, ipc::Rank rank) {
  ipc::Error named = error;
  named.message = fmt::format("engine {} rank {}: {}", engine, rank.value, error.message);
  return named;
}

}  // namespace

std::chrono::milliseconds clear_margin(std::uint64_t pool_bytes) {
  const ipc::LeaseTimeouts timeouts;
  const std::uint64_t pinned_gib = (pool_bytes >> 30U) + 1;
  return timeouts.kill + pinned_gib * timeouts.kill_per_pinned_gib + 2 * timeouts.settle +
         kAnswerMargin;
}

ipc::Result<std::vector<EngineRecord*>> Lifecycle::engines_for(const ipc::Peer& peer,
                                                               const std::string& name) {
  std::vector<EngineRecord*> engines;
  if (!name.empty()) {
    EngineRecord* engine = context_.directory.find(name);
    if (engine == nullptr) {
      return KVFERRY_ERROR(kNotFound, "instance {} has no engine {}: see status for the known ones",
                           context_.config.instance, name);
    }
    engines.push_back(engine);
  } else if (const ClientRecord* client = context_.directory.client(peer.id)) {
    engines.push_back(client->engine);  // An engine's own client speaks for its engine alone.
  } else {
    for (const auto& [known, engine] : context_.directory.engines()) {
      engines.push_back(engine.get());
    }
  }
  for (const EngineRecord* engine : engines) {
    if (engine->operation() != EngineOperation::kNone) {
      return KVFERRY_ERROR(kBusy, "engine {} runs a {} already: retry when it is over",
                           engine->name(),
                           engine->operation() == EngineOperation::kClear ? "clear" : "reinit");
    }
  }
  return engines;
}

void Lifecycle::clear(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto message = ipc::decode<ipc::ClearRequest>(request.body, "ClearRequest");
  if (!message) {
    context_.refuse(peer, request, message.error());
    return;
  }
  if (message->deadline.count() <= 0 || message->deadline > kLongestDeadline) {
    context_.refuse(peer, request,
                    KVFERRY_ERROR(kInvalidArgument, "clear deadline of {} ms: give 1 to {} ms",
                                  message->deadline.count(), kLongestDeadline.count()));
    return;
  }
  auto engines = engines_for(peer, message->engine);
  if (!engines) {
    context_.refuse(peer, request, engines.error());
    return;
  }
  auto clear = std::make_shared<Clear>();
  clear->peer = peer;
  clear->request = request;
  clear->host = message->host;
  clear->start = ipc::MonotonicClock::now();
  clear->engines = *engines;
  clears_.push_back(clear);
  clear->pending = 1;  // Held until everything is sent.
  for (EngineRecord* engine : clear->engines) {
    start_clear(clear, *engine, message->deadline);
  }
  if (--clear->pending == 0) {
    finish_clear(clear);
  }
}

void Lifecycle::start_clear(const ClearRef& clear, EngineRecord& engine, ipc::Duration deadline) {
  ipc::log_info("engine {}: clear starts, asked by {}, host tier {}", engine.name(),
                clear->peer.name, clear->host == ipc::HostPolicy::kDrop ? "dropped" : "kept");
  // Admission ends first; queued jobs end as revoked, what runs drains at the movers.
  engine.begin(EngineOperation::kClear);
  context_.jobs.fail_queued(engine.id(),
                            KVFERRY_ERROR(kRevoked, "engine {} is being cleared", engine.name()));
  context_.engine_changed(engine);
  for (std::uint32_t rank = 0; rank < engine.ranks().size(); ++rank) {
    const std::size_t index = clear->ranks.size();
    clear->ranks.push_back({.engine = engine.name(),
                            .rank = ipc::Rank{rank},
                            .outcome = {},
                            .error = {},
                            .attacher_note = {},
                            .attacher_free_before = 0,
                            .attacher_free_after = 0,
                            .attacher_open = false,
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
      send_clear(clear, index, *owner, /*is_owner=*/true, deadline);
    }
    if (attacher != nullptr && !attacher->state.session.is_zero() &&
        attacher->state.epoch.value != 0) {
      send_clear(clear, index, *attacher, /*is_owner=*/false, deadline);
    }
  }
}

void Lifecycle::send_clear(const ClearRef& clear,
                           std::size_t index,
                           const RankPeer& target,
                           bool is_owner,
                           ipc::Duration deadline) {
  ipc::RankClear message;
  message.session = target.state.session;
  message.epoch = target.state.epoch;
  message.deadline = std::chrono::duration_cast<std::chrono::milliseconds>(deadline);
  ++clear->pending;
  clear->ranks[index].attacher_open = clear->ranks[index].attacher_open || !is_owner;
  context_.calls.call(target.id, ipc::MessageKind::kRankClear, message,
                      ipc::Deadline::after(deadline + margin_),
                      [this, clear, index, is_owner,
                       asked = target.state](const ipc::Result<ipc::Envelope>& answer) {
                        on_clear_answer(clear, index, is_owner, asked, answer);
                      });
}

void Lifecycle::on_clear_answer(const ClearRef& clear,
                                std::size_t index,
                                bool is_owner,
                                const ipc::RankState& asked,
                                const ipc::Result<ipc::Envelope>& answer) {
  if (clear->answered) {
    return;
  }
  ClearRank& rank = clear->ranks[index];
  if (!is_owner && !std::exchange(rank.attacher_open, false)) {
    return;  // Too late: nobody waits for it any more.
  }
  ipc::Result<ipc::RankClearReply> reply =
      answer ? ipc::decode<ipc::RankClearReply>(answer->body, "RankClearReply")
             : ipc::Result<ipc::RankClearReply>(answer.error());
  if (reply) {
    if (EngineRecord* engine = context_.directory.find(rank.engine)) {
      engine->note_cleared(rank.rank.value, asked.session, asked.epoch);
    }
    if (is_owner) {
      rank.outcome = *reply;
      limit_attacher(clear, index);
    } else {
      rank.attacher_free_before = reply->free_before;
      rank.attacher_free_after = reply->free_after;
    }
  } else if (is_owner) {
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

void Lifecycle::limit_attacher(const ClearRef& clear, std::size_t index) {
  if (!clear->ranks[index].attacher_open) {
    return;
  }
  context_.loop.after(kAttacherGrace, [this, clear, index] {
    ClearRank& rank = clear->ranks[index];
    if (clear->answered || !std::exchange(rank.attacher_open, false)) {
      return;
    }
    rank.attacher_note = "no answer, the owner's counts";
    if (--clear->pending == 0) {
      finish_clear(clear);
    }
  });
}

// What each rank reached; the first error, which tells how many more there are.
std::optional<ipc::Error> Lifecycle::collect_outcomes(Clear& clear, ipc::ClearReply& reply) {
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
  if (failed > 1) {
    first->message += fmt::format(" (and {} more ranks)", failed - 1);
  }
  return first;
}

void Lifecycle::finish_clear(const ClearRef& clear) {
  clear->answered = true;
  ipc::ClearReply reply;
  const std::optional<ipc::Error> first = collect_outcomes(*clear, reply);
  for (EngineRecord* engine : clear->engines) {
    // Whatever became of the ranks: no tier is left out because another one failed.
    if (clear->host == ipc::HostPolicy::kDrop) {
      reply.host_blocks_dropped += context_.host.drop_prefixes(*engine);
    }
    const bool all = std::none_of(clear->ranks.begin(), clear->ranks.end(), [&](const auto& rank) {
      return rank.engine == engine->name() && rank.error.has_value();
    });
    engine->end_operation(/*succeeded=*/all && !engine->ranks().empty());
  }
  reply.took = std::chrono::duration_cast<std::chrono::microseconds>(ipc::MonotonicClock::now() -
                                                                     clear->start);
  const std::vector<EngineRecord*> engines = clear->engines;
  for (EngineRecord* engine : engines) {
    ipc::log_info("engine {}: clear ends after {} ms, {} host blocks dropped", engine->name(),
                  reply.took.count() / 1000, reply.host_blocks_dropped);
    context_.engine_changed(*engine);
  }
  std::erase(clears_, clear);
  if (!first) {
    context_.reply(clear->peer, clear->request, reply);
  } else {
    ipc::log_warn("clear failed: {}", first->to_string());
    if (clear->request.request.value != 0) {
      ManagerContext::log_unsent(clear->peer, context_.server.reply_partial(
                                                  clear->peer.id, clear->request, reply, *first));
    }
  }
  for (EngineRecord* engine : engines) {
    const std::string name = engine->name();
    context_.drop_if_unused(name);
  }
}

ipc::Status Lifecycle::check_reinit(const EngineRecord& engine) const {
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

void Lifecycle::reinit(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto message = ipc::decode<ipc::ReinitRequest>(request.body, "ReinitRequest");
  if (!message) {
    context_.refuse(peer, request, message.error());
    return;
  }
  auto engines = engines_for(peer, message->engine);
  ipc::Status status = engines ? ipc::ok() : ipc::Status(engines.error());
  if (status && engines->size() != 1) {
    status = KVFERRY_ERROR(kInvalidArgument, "reinit is for one engine and there are {}: name it",
                           engines->size());
  }
  if (status && (message->deadline.count() <= 0 || message->deadline > kLongestDeadline)) {
    status = KVFERRY_ERROR(kInvalidArgument, "reinit deadline of {} ms: give 1 to {} ms",
                           message->deadline.count(), kLongestDeadline.count());
  }
  if (status) {
    status = check_reinit(*engines->front());
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  EngineRecord& engine = *engines->front();
  ipc::log_info("engine {}: reinit starts, asked by {}", engine.name(), peer.name);
  auto reinit = std::make_shared<Reinit>();
  reinit->peer = peer;
  reinit->request = request;
  reinit->start = ipc::MonotonicClock::now();
  reinit->give_up = reinit->start + message->deadline + margin_;
  reinit->engine = &engine;
  reinits_.push_back(reinit);
  engine.begin(EngineOperation::kReinit);
  reinit->pending = 1;  // Held until everything is sent.
  for (std::uint32_t rank = 0; rank < engine.ranks().size(); ++rank) {
    if (engine.rank_ready(rank)) {
      continue;
    }
    const RankPeer& owner = *engine.owner(rank);
    const bool allocated = owner.state.phase == ipc::LeasePhase::kReady;
    ipc::RankReinit order;
    order.epoch = ipc::Epoch{owner.state.epoch.value + (allocated ? 0U : 1U)};
    order.gpu_blocks = message->gpu_blocks;
    order.deadline = message->deadline;
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

void Lifecycle::reinit_owner(const ReinitRef& reinit,
                             std::uint32_t rank,
                             const ipc::IncarnationId& owner,
                             const ipc::RankReinit& order) {
  ++reinit->pending;
  context_.calls.call(
      owner, ipc::MessageKind::kRankReinit, order, ipc::Deadline::at(reinit->give_up),
      [this, reinit, rank, order](const ipc::Result<ipc::Envelope>& answer) {
        if (reinit->answered) {
          return;
        }
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

void Lifecycle::reinit_attacher(const ReinitRef& reinit,
                                std::uint32_t rank,
                                const ipc::RankReinit& order) {
  const EngineRecord& engine = *reinit->engine;
  if (rank >= engine.ranks().size() || engine.attacher(rank) == nullptr) {
    return;
  }
  const bool is_mover = engine.config()->cache_owner == ipc::CacheOwner::kWorker;
  ++reinit->pending;
  context_.calls.call(
      engine.attacher(rank)->id, ipc::MessageKind::kRankReinit, order,
      ipc::Deadline::at(reinit->give_up),
      [this, reinit, rank, is_mover](const ipc::Result<ipc::Envelope>& answer) {
        if (reinit->answered) {
          return;
        }
        if (!answer && is_mover && is_gone(answer.error().code)) {
          // The workers serve on without offload until another mover has attached.
          ipc::log_warn("engine {} rank {}: its mover is gone, reinit goes on without",
                        reinit->engine->name(), rank);
        } else if (!answer && !reinit->error) {
          reinit->error = in_rank(answer.error(), reinit->engine->name(), ipc::Rank{rank});
        }
        if (--reinit->pending == 0) {
          finish_reinit(reinit);
        }
      });
}

void Lifecycle::on_engine_changed(const EngineRecord& engine) {
  const std::vector<ReinitRef> reinits = reinits_;
  for (const ReinitRef& reinit : reinits) {
    if (reinit->waits_for_ready && reinit->engine == &engine &&
        engine.phase() == ipc::CachePhase::kReady) {
      finish_reinit(reinit);
    }
  }
}

void Lifecycle::finish_reinit(const ReinitRef& reinit) {
  EngineRecord& engine = *reinit->engine;
  const bool ready = engine.phase() == ipc::CachePhase::kReady;
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
  engine.end_operation(/*succeeded=*/!reinit->error);
  if (reinit->error) {
    ipc::log_warn("engine {}: reinit failed: {}", engine.name(), reinit->error->to_string());
    engine.set_note(reinit->error->message);
    context_.engine_changed(engine);
    context_.refuse(reinit->peer, reinit->request, *reinit->error);
    const std::string name = engine.name();
    context_.drop_if_unused(name);
    return;
  }
  ipc::ReinitReply reply;
  reply.generation = engine.generation();
  reply.took = std::chrono::duration_cast<std::chrono::microseconds>(ipc::MonotonicClock::now() -
                                                                     reinit->start);
  ipc::log_info("engine {}: reinit ends after {} ms, generation {}", engine.name(),
                reply.took.count() / 1000, reply.generation);
  context_.reply(reinit->peer, reinit->request, reply);
}

void Lifecycle::cancel_all() {
  const ipc::Error ending =
      KVFERRY_ERROR(kCancelled, "the manager ends; the ranks finish what they were told");
  for (const ClearRef& clear : clears_) {
    clear->answered = true;
    context_.refuse(clear->peer, clear->request, ending);
  }
  for (const ReinitRef& reinit : reinits_) {
    reinit->answered = true;
    context_.loop.cancel(reinit->timer);
    context_.refuse(reinit->peer, reinit->request, ending);
  }
  clears_.clear();
  reinits_.clear();
}

}  // namespace kvferry::cache_manager
