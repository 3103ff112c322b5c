// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/manager_core.hpp"

#include "manager/status_report.hpp"

#include <chrono>
#include <utility>

namespace kvferry::cache_manager {
namespace {

constexpr std::chrono::milliseconds kStopDrain{2000};
constexpr std::chrono::milliseconds kFarewell{50};

ipc::ControlServer::Options server_options(const ipc::RuntimeDir& dir,
                                           const HostPool& pool,
                                           int pool_fd,
                                           const PoolCatalogue& catalogue,
                                           const ipc::PrefixTable& table,
                                           const ipc::SessionId& session) {
  ipc::ControlServer::Options options;
  options.registry_path = dir.registry_socket();
  options.control_path = dir.control_socket();
  options.session = session;
  options.pool_fd = pool_fd;
  options.pool_bytes = pool.stats().bytes;
  options.pool = catalogue.id();
  options.catalogue_fd = catalogue.fd().get();
  options.catalogue_bytes = catalogue.size_bytes();
  options.table_fd = table.fd().get();
  options.table_bytes = table.size_bytes();
  return options;
}

// Operators come and go with every look at the status.
void log_peer(const ipc::Peer& peer, std::string_view what) {
  if (peer.kind == ipc::ProcessKind::kOperator) {
    ipc::log_debug("{} (pid {}) {}", peer.name, peer.pid, what);
  } else {
    ipc::log_info("{} (pid {}) {}", peer.name, peer.pid, what);
  }
}

}  // namespace

ManagerCore::ManagerCore(ipc::EventLoop& loop,
                         const ManagerConfig& config,
                         const ipc::RuntimeDir& dir,
                         HostPool& pool,
                         int pool_fd,
                         PoolCatalogue& catalogue,
                         bool adopts)
    : config_(config),
      dir_(dir),
      transitions_(
          ipc::TransitionLog::create_or_warn(dir, {.role = "manager", .incarnation = session_})),
      loop_(loop),
      pool_(pool),
      started_(ipc::MonotonicClock::now()),
      index_(pool, config.eviction_policy, config.quotas),
      host_(directory_, index_, sequences_),
      server_(loop, server_options(dir, pool, pool_fd, catalogue, index_.table(), session_), *this),
      calls_(loop, server_),
      jobs_(pool,
            {.targets = [this](std::uint32_t engine,
                               std::uint64_t generation) { return targets(engine, generation); },
             .send =
                 [this](const ipc::IncarnationId& mover, const ipc::MoverJob& job) {
                   return server_.notify(mover, ipc::MessageKind::kMoverJob, job);
                 },
             .cancel =
                 [this](const ipc::IncarnationId& mover, ipc::JobId job) {
                   const ipc::Status sent =
                       server_.notify(mover, ipc::MessageKind::kMoverCancel, ipc::MoverCancel{job});
                   if (!sent) {
                     ipc::log_debug("cancel of job {} not sent: {}", job.value,
                                    sent.error().to_string());
                   }
                 },
             .finished = [this](Job& job) { job_finished(job); },
             .is_stopped =
                 [this](const ipc::IncarnationId& worker) {
                   const ipc::ProcessRef* process = server_.process(worker);
                   return process != nullptr && process->is_stopped();
                 },
             .transitions = transitions_},
            {.max_jobs_per_engine = config.max_jobs_per_engine,
             .queue_deadline = config.queue_deadline,
             .job_deadline = config.job_deadline,
             .wants_sums = config.checksums,
             .sums_first = config.verify_loads == VerifyLoads::kAlways}),
      context_{.config = config_,
               .dir = dir_,
               .loop = loop,
               .server = server_,
               .calls = calls_,
               .directory = directory_,
               .pool = pool,
               .catalogue = catalogue,
               .index = index_,
               .sequences = sequences_,
               .host = host_,
               .jobs = jobs_,
               .transitions = transitions_,
               .engine_changed = [this](EngineRecord& engine) { engine_changed(engine); },
               .operation_ended = [this] { after_event(); }},
      job_service_(context_),
      clients_(context_,
               job_service_,
               [this](const ClientRecord& client,
                      std::optional<ipc::PauseMode> paused,
                      bool by_release) { lifecycle_.on_scheduler(client, paused, by_release); }),
      deaths_(context_),
      ranks_(context_, clients_, deaths_, job_service_),
      lifecycle_(context_),
      overdue_(context_, [this] { after_event(); }),
      ahead_(loop, pool, index_, config_.watermarks) {
  context_.ahead = &ahead_;
  if (!config_.kv_events.empty()) {
    kv_events_.emplace(loop_, directory_, index_, config_, session_);
    context_.kv_events = &*kv_events_;
  }
  sequences_.on_let_go(
      [this](const HostBlock& block) { context_.catalogue.on_hidden(block.slot()); });
  if (adopts) adoption_.emplace(context_, catalogue);
}

ManagerCore::~ManagerCore() { loop_.cancel(stop_timer_); }

// ---- peers ----

void ManagerCore::on_peer(const ipc::Peer& peer) {
  directory_.add_peer(peer);
  jobs_.mover_rejoined(peer.id);
  if (EngineRecord* engine = directory_.engine_of(peer.id)) {
    engine->set_connected(peer.id, true);
    engine_changed(*engine);
  }
  log_peer(peer, "connected");
}

void ManagerCore::on_peer_writable(const ipc::Peer& peer) {
  job_service_.on_writable(peer.id);
  after_event();
}

void ManagerCore::on_peer_silent(const ipc::Peer& peer) {
  if (peer.kind == ipc::ProcessKind::kEngine) {
    ipc::log_info("engine client {} (pid {}) closed its connection", peer.name, peer.pid);
    clients_.end_client(peer.id, /*with_sequences=*/false);
  } else if (EngineRecord* engine = directory_.engine_of(peer.id)) {
    ipc::log_warn("{} (pid {}) closed its connection, its death is not proven", peer.name,
                  peer.pid);
    engine->set_connected(peer.id, false);
    engine_changed(*engine);
  } else {
    ipc::log_debug("{} (pid {}) closed its connection", peer.name, peer.pid);
    // An operator keeps nothing here, and is not heard from again under this name.
    if (peer.kind == ipc::ProcessKind::kOperator) {
      server_.forget_when_closed(peer.id);
    }
  }
  lifecycle_.on_peer_gone(peer.id);
  after_event();
}

void ManagerCore::on_peer_left(const ipc::Peer& peer) {
  ipc::log_debug("{} (pid {}) has left", peer.name, peer.pid);
  directory_.remove_peer(peer.id);
  if (peer.kind == ipc::ProcessKind::kEngine) {
    drop_client(peer.id);
  }
  calls_.on_peer_died(peer.id);
  lifecycle_.on_peer_gone(peer.id);
  after_event();
}

void ManagerCore::on_peer_died(const ipc::Peer& peer) {
  if (peer.kind != ipc::ProcessKind::kOperator) {
    transitions_.record(ipc::Transition::kManagerSeesDeath, {.peer = peer.id});
  }
  EngineRecord* engine = directory_.engine_of(peer.id);
  // An operation that ends with this death may be what kept the engine.
  const std::string engine_name = engine != nullptr ? engine->name() : std::string();
  directory_.remove_peer(peer.id);
  for (const auto& [name, record] : directory_.engines()) {
    record->forget_turned_away(peer.id);
  }
  if (peer.kind == ipc::ProcessKind::kEngine) {
    ipc::log_info("engine client {} (pid {}) is dead", peer.name, peer.pid);
    drop_client(peer.id);
  }
  if (engine != nullptr) {
    ipc::log_warn("engine {}: {} {} (pid {}) is dead", engine->name(), ipc::to_string(peer.kind),
                  peer.name, peer.pid);
    const std::uint32_t engine_id = engine->id();
    // None when a successor has the rank already: the link is that one's.
    const std::optional<std::uint32_t> rank = engine->rank_of_mover(peer.id);
    engine->remove(peer.id);
    engine_changed(*engine);
    // Its engine's jobs have been told before: none of them goes to the others' links.
    if (rank) jobs_.drop_share(engine_id, ipc::Rank{*rank});
  }
  context_.catalogue.forget_user(peer.id);
  jobs_.mover_died(peer.id);
  deaths_.worker_died(peer.id);
  deaths_.mover_died(peer.id);
  calls_.on_peer_died(peer.id);
  lifecycle_.on_peer_gone(peer.id);
  if (!engine_name.empty()) {
    context_.drop_if_unused(engine_name);
  }
  after_event();
}

void ManagerCore::drop_client(const ipc::IncarnationId& client) {
  clients_.end_client(client, /*with_sequences=*/true);
  jobs_.forget_client(client);
  std::vector<std::string> names;
  for (const auto& [name, record] : directory_.engines()) {
    names.push_back(name);
  }
  for (const std::string& name : names) {
    context_.drop_if_unused(name);
  }
}

// ---- messages ----

void ManagerCore::on_message(const ipc::Peer& peer, ipc::Envelope envelope) {
  if (envelope.is_reply) {
    if (!calls_.on_reply(peer.id, envelope)) {
      ipc::log_debug("late reply {} of {} dropped", envelope.request.value, peer.name);
    }
  } else {
    dispatch(peer, envelope);
  }
  after_event();
}

void ManagerCore::dispatch(const ipc::Peer& peer, const ipc::Envelope& envelope) {
  if (envelope.kind == ipc::MessageKind::kBye) {
    on_bye(peer);
    return;
  }
  const bool rank_peer =
      peer.kind == ipc::ProcessKind::kWorker || peer.kind == ipc::ProcessKind::kMover;
  const bool handled = rank_peer ? ranks_.handle(peer, envelope) : handle_command(peer, envelope);
  if (!handled) {
    context_.refuse_misuse(
        peer, envelope,
        KVFERRY_ERROR(kProtocol, "message {} is not for the manager from a peer of kind {}",
                      static_cast<int>(envelope.kind), ipc::to_string(peer.kind)));
  }
}

bool ManagerCore::handle_command(const ipc::Peer& peer, const ipc::Envelope& envelope) {
  using Kind = ipc::MessageKind;
  switch (envelope.kind) {
    case Kind::kClear:
      if (!context_.stopping) {
        lifecycle_.clear(peer, envelope);
      } else {
        context_.refuse(peer, envelope, KVFERRY_ERROR(kNotReady, "the manager is ending"));
      }
      return true;
    case Kind::kReinit: lifecycle_.reinit(peer, envelope); return true;
    case Kind::kPause: lifecycle_.pause(peer, envelope); return true;
    case Kind::kContinue: lifecycle_.resume(peer, envelope); return true;
    case Kind::kFlush: lifecycle_.flush(peer, envelope); return true;
    case Kind::kReleaseMemory: lifecycle_.release_memory(peer, envelope); return true;
    case Kind::kResumeMemory: lifecycle_.resume_memory(peer, envelope); return true;
    case Kind::kUpdateWeights: lifecycle_.update_weights(peer, envelope); return true;
    case Kind::kComponents: lifecycle_.components(peer, envelope); return true;
    case Kind::kWeightsPart: lifecycle_.weights_part(peer, envelope); return true;
    case Kind::kStatus:
      context_.reply(
          peer, envelope,
          ipc::StatusReply{status_json(context_, job_service_.unsent(), job_service_.sums_awaited(),
                                       started_, deaths_.open())});
      return true;
    default: return peer.kind == ipc::ProcessKind::kEngine && clients_.handle(peer, envelope);
  }
}

void ManagerCore::on_bye(const ipc::Peer& peer) {
  log_peer(peer, "says bye");
  if (peer.kind == ipc::ProcessKind::kEngine) {
    clients_.end_client(peer.id, /*with_sequences=*/true);
    server_.forget_when_closed(peer.id);
  } else if (EngineRecord* engine = directory_.engine_of(peer.id)) {
    engine->set_connected(peer.id, false);
    engine_changed(*engine);
  }
}

// ---- engines and jobs ----

void ManagerCore::engine_changed(EngineRecord& engine) {
  const bool changed = engine.refresh(directory_.next_generation());
  if (changed) {
    clients_.on_weights(engine);
    ipc::log_info("engine {}: {}, generation {}, offload {}", engine.name(),
                  to_string(engine.phase()), engine.generation(),
                  engine.offload_ready() ? "ready" : "not ready");
    for (const ClientRecord* client : directory_.clients_of(engine)) {
      ipc::EngineState state = client->view();
      if (client->mismatch) {
        state = {};
        state.refused = client->mismatch;
      }
      const ipc::Status sent =
          server_.notify(client->peer.id, ipc::MessageKind::kEngineState, state);
      if (!sent) {
        ipc::log_warn("engine state not sent to {}: {}", client->peer.name,
                      sent.error().to_string());
      }
    }
  }
  const auto fail = [&](const ipc::Error& error) {
    job_service_.fail_waiting(engine.id(), error);
    jobs_.fail_queued(engine.id(), error);
  };
  if (engine.offload_ready()) {
    jobs_.pump(engine.id());
  } else if (engine.phase() == ipc::CachePhase::kReady) {
    fail(KVFERRY_ERROR(kNotReady, "engine {} has lost a mover", engine.name()));
  } else if (engine.waits_for_worker()) {
    fail(KVFERRY_ERROR(kNotReady,
                       "engine {} waits for a worker; its device blocks are kept, submit again "
                       "when it is ready",
                       engine.name()));
  } else {
    fail(KVFERRY_ERROR(kRevoked, "engine {} is {}", engine.name(), to_string(engine.phase())));
  }
  lifecycle_.on_engine_changed(engine);
  deaths_.settle(engine);
}

ipc::Result<std::vector<RankTarget>> ManagerCore::targets(std::uint32_t engine,
                                                          std::uint64_t generation) {
  const EngineRecord* record = directory_.find(engine);
  if (record == nullptr) {
    return KVFERRY_ERROR(kNotReady, "the engine is gone");
  }
  return record->targets(generation);
}

void ManagerCore::job_finished(Job& job) {
  const bool orphaned = job.orphaned;
  job_service_.finished(job);
  if (!orphaned || orphan_check_posted_) {
    return;
  }
  orphan_check_posted_ = true;
  // Not from inside the job table.
  loop_.post([this, engine = job.engine, client = job.client] {
    orphan_check_posted_ = false;
    if (!directory_.is_living(client)) {
      jobs_.forget_client(client);
    }
    clients_.answer_waiting_hellos();
    if (const EngineRecord* record = directory_.find(engine)) {
      const std::string name = record->name();
      context_.drop_if_unused(name);
    }
  });
}

void ManagerCore::after_event() {
  lifecycle_.on_jobs_changed();
  clients_.answer_waiting_hellos();
  overdue_.arm();
  // Nothing of theirs may begin in the middle of it.
  for (const auto& [name, engine] : directory_.engines()) {
    if (holds_while_it_runs(engine->operation())) {
      job_service_.fail_waiting(engine->id(), KVFERRY_ERROR(kRevoked, "engine {}: {} runs", name,
                                                            to_string(engine->operation())));
    }
  }
  if (adoption_) adoption_->look();
  ahead_.look();
  if (context_.stopping && jobs_.unfinished() == 0 && job_service_.unsent() == 0) {
    finish_stop();
  }
}

// ---- the end ----

void ManagerCore::begin_stop(std::function<void()> stopped) {
  if (context_.stopping) {
    finish_stop();
    return;
  }
  stopped_ = std::move(stopped);
  context_.stopping = true;
  ipc::log_info("ending: {} jobs are unfinished, waiting at most {} ms for them",
                jobs_.unfinished(), kStopDrain.count());
  lifecycle_.cancel_all();
  job_service_.fail_all_waiting(KVFERRY_ERROR(kCancelled, "the manager is ending"));
  for (const auto& [name, engine] : directory_.engines()) {
    jobs_.fail_queued(engine->id(), KVFERRY_ERROR(kCancelled, "the manager is ending"));
  }
  stop_timer_ = loop_.after(kStopDrain, [this] {
    ipc::log_warn("ending with {} jobs unfinished", jobs_.unfinished());
    finish_stop();
  });
  after_event();
}

void ManagerCore::finish_stop() {
  if (stopped_ == nullptr) {
    return;
  }
  loop_.cancel(stop_timer_);
  ipc::Envelope bye;
  bye.kind = ipc::MessageKind::kBye;
  for (const auto& [id, peer] : directory_.peers()) {
    // Without a word they keep the pool, as when we had been killed.
    if (config_.keeps_pool && peer.kind == ipc::ProcessKind::kMover) continue;
    if (const ipc::Status sent = server_.send(id, bye); !sent) {
      ipc::log_debug("bye not sent to {}: {}", peer.name, sent.error().to_string());
    }
  }
  // The last messages leave before the connections end.
  stop_timer_ = loop_.after(kFarewell, std::exchange(stopped_, nullptr));
}

}  // namespace kvferry::cache_manager
