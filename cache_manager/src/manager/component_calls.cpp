// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/component_calls.hpp"

#include "manager/rank_errors.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

namespace kvferry::cache_manager {
namespace {

/// A rank ends a release at the deadline that it was told, and says why: that is worth waiting for.
/// Less than clients wait beyond what they tell the manager.
constexpr std::chrono::milliseconds kReleaseMargin{2000};

/// What one rank's answer came to: its own error, or the first of its components.
std::optional<ipc::Error> first_error(const ipc::RankComponentsOutcome& rank) {
  if (rank.error) {
    return rank.error;
  }
  for (const ipc::ComponentOutcome& component : rank.reply.components) {
    if (component.error) {
      ipc::Error named = *component.error;
      named.message =
          fmt::format("component {}: {}", component.outcome.component.name, named.message);
      return named;
    }
  }
  return std::nullopt;
}

}  // namespace

void ComponentCalls::ask(const ipc::Peer& peer,
                         const ipc::Envelope& request,
                         const ipc::ComponentsRequest& message,
                         const EngineRecord& engine) {
  const bool releases = !message.release.only_looks();
  const bool busy = std::any_of(rounds_.begin(), rounds_.end(), [&](const RoundRef& other) {
    return other->releases && other->engine == engine.name();
  });
  if (releases && busy) {
    context_.refuse(
        peer, request,
        KVFERRY_ERROR(kBusy,
                      "engine {} runs a release of components already: retry when it is over",
                      engine.name()));
    return;
  }
  const auto round = std::make_shared<Round>();
  round->peer = peer;
  round->request = request;
  round->request.body.clear();
  round->engine = engine.name();
  round->releases = releases;
  round->start = ipc::MonotonicClock::now();
  rounds_.push_back(round);
  if (releases) {
    ipc::log_info("engine {}: {} asks for the release of {}", round->engine, peer.name,
                  message.release.all
                      ? std::string("all components")
                      : fmt::format("components {}", fmt::join(message.release.names, ", ")));
  }
  const ipc::Deadline deadline = ipc::Deadline::after(
      message.deadline + (releases ? kReleaseMargin : std::chrono::milliseconds(0)));
  const ipc::RankComponents order{.release = message.release, .deadline = message.deadline};
  round->pending = 1;  // Held until everything is sent.
  for (std::uint32_t rank = 0; rank < engine.ranks().size(); ++rank) {
    round->reply.ranks.emplace_back().rank = ipc::Rank{rank};
    const std::optional<RankPeer>& worker = engine.ranks()[rank].worker;
    if (!worker || !worker->connected) {
      note(*round, rank,
           KVFERRY_ERROR(kNotReady,
                         "its worker is not there: start it, or ask again when status "
                         "shows it"));
      continue;
    }
    ++round->pending;
    context_.calls.call(worker->id, ipc::MessageKind::kRankComponents, order, deadline,
                        [this, round, rank](const ipc::Result<ipc::Envelope>& answer) {
                          if (!round->answered) {
                            note(*round, rank, answer);
                            end_one(round);
                          }
                        });
  }
  end_one(round);
}

void ComponentCalls::note(Round& round,
                          std::uint32_t rank,
                          const ipc::Result<ipc::Envelope>& answer) {
  auto reply = answer ? ipc::decode<ipc::RankComponentsReply>(answer->body, "RankComponentsReply")
                      : ipc::Result<ipc::RankComponentsReply>(answer.error());
  ipc::RankComponentsOutcome& outcome = round.reply.ranks[rank];
  if (const ipc::Status fits = reply ? reply->check() : ipc::ok(); !fits) {
    outcome.error = fits.error();
  } else if (reply) {
    outcome.reply = std::move(*reply);
  } else {
    outcome.error = reply.error();
  }
}

void ComponentCalls::end_one(const RoundRef& round) {
  if (--round->pending > 0) {
    return;
  }
  round->answered = true;
  std::erase(rounds_, round);
  round->reply.took = std::chrono::duration_cast<std::chrono::microseconds>(
      ipc::MonotonicClock::now() - round->start);
  if (round->request.request.value == 0) {
    return;  // Nobody waits for an answer.
  }
  for (const ipc::RankComponentsOutcome& rank : round->reply.ranks) {
    if (const auto error = first_error(rank)) {
      ManagerContext::log_unsent(
          round->peer, context_.server.reply_partial(round->peer.id, round->request, round->reply,
                                                     in_rank(*error, round->engine, rank.rank)));
      return;
    }
  }
  context_.reply(round->peer, round->request, round->reply);
}

void ComponentCalls::cancel_all(const ipc::Error& why) {
  for (const RoundRef& round : std::exchange(rounds_, {})) {
    round->answered = true;
    context_.refuse(round->peer, round->request, why);
  }
}

}  // namespace kvferry::cache_manager
