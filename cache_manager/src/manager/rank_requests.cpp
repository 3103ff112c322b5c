// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/rank_requests.hpp"

#include "manager/names.hpp"
#include "manager/pool_adoption.hpp"

#include <utility>

namespace kvferry::cache_manager {

bool RankRequests::handle(const ipc::Peer& peer, const ipc::Envelope& request) {
  switch (request.kind) {
    case ipc::MessageKind::kRankHello: hello(peer, request); return true;
    case ipc::MessageKind::kRankState: state(peer, request); return true;
    case ipc::MessageKind::kMoverJobDone:
      if (peer.kind != ipc::ProcessKind::kMover) {
        return false;
      }
      job_done(peer, request);
      return true;
    case ipc::MessageKind::kMoverSums:
      if (peer.kind != ipc::ProcessKind::kMover) {
        return false;
      }
      sums(peer, request);
      return true;
    case ipc::MessageKind::kKeptSums:
      if (peer.kind != ipc::ProcessKind::kMover) {
        return false;
      }
      kept_sums(peer, request);
      return true;
    default: return false;
  }
}

void RankRequests::hello(const ipc::Peer& peer, const ipc::Envelope& request) {
  auto hello = ipc::decode<ipc::RankHello>(request.body, "RankHello");
  ipc::Status status = hello ? check_engine_name(hello->engine) : ipc::Status(hello.error());
  if (status) {
    const EngineRecord* bound = context_.directory.engine_of(peer.id);
    if (bound != nullptr && bound->name() != hello->engine) {
      status = KVFERRY_ERROR(kProtocol, "{} serves engine {} and says hello for engine {}",
                             peer.name, bound->name(), hello->engine);
    }
  }
  if (!status) {
    context_.refuse_misuse(peer, request, status.error());
    return;
  }
  EngineRecord& engine = context_.directory.open(hello->engine);
  make_way(engine, *hello);
  const bool is_first = !engine.config();
  if (ipc::Status admitted = engine.admit(peer, *hello); !admitted) {
    ipc::log_warn("{} (pid {}) refused: {}", peer.name, peer.pid, admitted.error().to_string());
    engine.set_refusal(
        fmt::format("{} (pid {}): {}", peer.name, peer.pid, admitted.error().to_string()));
    context_.refuse(peer, request, admitted.error());
    if (admitted.error().code == ipc::ErrorCode::kAlreadyExists) {
      engine.note_turned_away(peer.id);
      context_.engine_changed(engine);
    }
    context_.drop_if_unused(hello->engine);
    return;
  }
  context_.transitions.record(ipc::Transition::kManagerRegister, {.peer = peer.id});
  context_.directory.bind(peer.id, engine);
  if (const ipc::ProcessRef* process = context_.server.process(peer.id)) {
    context_.catalogue.note_user(*process, peer.id,
                                 peer.kind == ipc::ProcessKind::kMover
                                     ? catalogue::UserKind::kMover
                                     : catalogue::UserKind::kWorker);
  }
  if (peer.kind == ipc::ProcessKind::kWorker) {
    deaths_.watch_worker(peer.id);
  } else {
    context_.jobs.set_share(engine.id(), hello->rank,
                            {.link = hello->link,
                             .weight = context_.config.share_of(engine.name()),
                             .paced_stores = hello->store_rate > 0,
                             .paced_loads = hello->load_rate > 0});
  }
  ipc::log_info("engine {}: rank {} of {} has {} {} (pid {}), geometry {}, device {}",
                engine.name(), hello->rank.value, hello->geometry.ranks, ipc::to_string(peer.kind),
                peer.name, peer.pid, hello->geometry.name, hello->device);
  if (is_first) {
    context_.host.drop_other_geometries(engine);
  }
  clients_.compare_clients(engine);
  context_.reply(peer, request, ipc::Empty{});
  context_.engine_changed(engine);
}

// A successor's hello may come before its predecessor's death has been told.
void RankRequests::make_way(EngineRecord& engine, const ipc::RankHello& hello) const {
  if (hello.rank.value >= engine.ranks().size()) {
    return;
  }
  const RankRecord& rank = engine.ranks()[hello.rank.value];
  const auto& place = hello.kind == ipc::ProcessKind::kWorker ? rank.worker : rank.mover;
  const ipc::ProcessRef* process = place ? context_.server.process(place->id) : nullptr;
  if (process != nullptr && process->has_died()) {
    engine.set_connected(place->id, false);
  }
}

void RankRequests::state(const ipc::Peer& peer, const ipc::Envelope& request) {
  auto report = ipc::decode<ipc::RankState>(request.body, "RankState");
  EngineRecord* engine = context_.directory.engine_of(peer.id);
  ipc::Status status =
      !report ? ipc::Status(report.error())
      : engine == nullptr
          ? ipc::Status(KVFERRY_ERROR(kProtocol, "state report without a rank hello"))
          : engine->report(peer.id, *report);
  if (!status) {
    context_.refuse_misuse(peer, request, status.error());
    return;
  }
  context_.reply(peer, request, ipc::Empty{});
  context_.engine_changed(*engine);
}

void RankRequests::job_done(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto done = ipc::decode<ipc::MoverJobDone>(request.body, "MoverJobDone");
  const EngineRecord* engine = context_.directory.engine_of(peer.id);
  ipc::Status status = done ? ipc::ok() : ipc::Status(done.error());
  if (status && engine == nullptr) {
    status = KVFERRY_ERROR(kProtocol, "job answer without a rank hello");
  }
  if (status && !done->shard_sums.empty()) {
    // Before the job ends: what it stored is never to be found without them.
    if (const auto rank = engine->rank_of_mover(peer.id)) {
      jobs_.summed(*rank, {done->job, done->replicated_sums, done->shard_sums});
    }
  }
  if (status) {
    status = context_.jobs.mover_done(peer.id, engine->id(), *done);
  }
  if (!status) {
    context_.refuse_misuse(peer, request, status.error());
    return;
  }
  context_.reply(peer, request, ipc::Empty{});
}

template <typename Sums>
std::optional<RankRequests::Told<Sums>> RankRequests::told(const ipc::Peer& peer,
                                                           const ipc::Envelope& event,
                                                           const char* name) {
  auto sums = ipc::decode<Sums>(event.body, name);
  const EngineRecord* engine = context_.directory.engine_of(peer.id);
  const std::optional<std::uint32_t> rank =
      engine == nullptr ? std::nullopt : engine->rank_of_mover(peer.id);
  ipc::Status status = sums ? ipc::ok() : ipc::Status(sums.error());
  if (status && !rank) {
    status = KVFERRY_ERROR(kProtocol, "{} from a mover that is of no rank", name);
  }
  if (!status) {
    context_.refuse_misuse(peer, event, status.error());
    return std::nullopt;
  }
  return Told<Sums>{*rank, std::move(sums).value()};
}

void RankRequests::sums(const ipc::Peer& peer, const ipc::Envelope& event) {
  auto of = told<ipc::MoverSums>(peer, event, "MoverSums");
  if (of) jobs_.summed(of->rank, std::move(of->sums));
}

void RankRequests::kept_sums(const ipc::Peer& peer, const ipc::Envelope& event) {
  const auto of = told<ipc::KeptSums>(peer, event, "KeptSums");
  if (of && context_.adoption != nullptr) context_.adoption->told(peer.id, of->rank, of->sums);
}

}  // namespace kvferry::cache_manager
