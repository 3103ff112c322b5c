// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/lifecycle.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvferry::cache_manager {
namespace {

constexpr std::chrono::milliseconds kClearMargin{5000};
constexpr std::chrono::milliseconds kLongestDeadline{600'000};

ipc::Status check_time(std::chrono::milliseconds time, std::string_view what, int least_ms) {
  if (time.count() >= least_ms && time <= kLongestDeadline) {
    return ipc::ok();
  }
  return KVFERRY_ERROR(kInvalidArgument, "{} of {} ms: give {} to {} ms", what, time.count(),
                       least_ms, kLongestDeadline.count());
}

}  // namespace

std::chrono::milliseconds clear_margin(std::uint64_t pool_bytes) {
  const ipc::LeaseTimeouts timeouts;
  const std::uint64_t pinned_gib = (pool_bytes >> 30U) + 1;
  return timeouts.kill + pinned_gib * timeouts.kill_per_pinned_gib + 2 * timeouts.settle +
         kClearMargin;
}

ipc::Result<ClearScope> Lifecycle::idle_scope(const ipc::Peer& peer, const std::string& name) {
  auto scope = find_scope(context_.directory, context_.dir, peer, name);
  if (!scope) {
    return scope;
  }
  for (const EngineRecord* engine : scope->engines) {
    if (engine->operation() != EngineOperation::kNone) {
      return KVFERRY_ERROR(kBusy, "engine {} runs a {} already: retry when it is over",
                           engine->name(), to_string(engine->operation()));
    }
  }
  return scope;
}

void Lifecycle::clear(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto message = ipc::decode<ipc::ClearRequest>(request.body, "ClearRequest");
  if (!message) {
    context_.refuse(peer, request, message.error());
    return;
  }
  if (const ipc::Status time = check_time(message->deadline, "clear deadline", 1); !time) {
    context_.refuse(peer, request, time.error());
    return;
  }
  end_generation_operations(peer, message->engine);
  auto scope = idle_scope(peer, message->engine);
  if (!scope) {
    context_.refuse(peer, request, scope.error());
    return;
  }
  const std::vector<EngineRecord*> engines = scope->engines;
  clears_.start({.by = peer, .host = message->host, .deadline = message->deadline},
                std::move(scope).value(),
                [this, peer, request, engines](const ClearOperations::Outcome& outcome) {
                  answer_clear(peer, request, outcome);
                  if (outcome.cancelled) return;
                  for (const EngineRecord* engine : engines) {
                    const std::string name = engine->name();
                    context_.drop_if_unused(name);
                  }
                });
}

void Lifecycle::answer_clear(const ipc::Peer& peer,
                             const ipc::Envelope& request,
                             const ClearOperations::Outcome& outcome) const {
  if (!outcome.failed) {
    context_.reply(peer, request, outcome.reply);
  } else if (outcome.cancelled) {
    context_.refuse(peer, request, *outcome.failed);
  } else if (request.request.value != 0) {
    ManagerContext::log_unsent(
        peer, context_.server.reply_partial(peer.id, request, outcome.reply, *outcome.failed));
  }
}

void Lifecycle::reinit(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto message = ipc::decode<ipc::ReinitRequest>(request.body, "ReinitRequest");
  if (!message) {
    context_.refuse(peer, request, message.error());
    return;
  }
  auto scope = idle_scope(peer, message->engine);
  ipc::Status status = scope ? ipc::ok() : ipc::Status(scope.error());
  if (status && scope->engines.empty()) {
    status = KVFERRY_ERROR(kNotReady,
                           "no worker or mover has registered yet, nothing was re-created: start "
                           "them, or retry when they have");
  } else if (status && scope->engines.size() != 1) {
    status = KVFERRY_ERROR(kInvalidArgument, "reinit is for one engine and there are {}: name it",
                           scope->engines.size());
  }
  if (status) {
    status = check_time(message->deadline, "reinit deadline", 1);
  }
  if (status) {
    status = reinits_.check(*scope->engines.front());
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  EngineRecord& engine = *scope->engines.front();
  reinits_.start({.by = peer, .gpu_blocks = message->gpu_blocks, .deadline = message->deadline},
                 engine,
                 [this, peer, request, &engine](const ipc::Result<ipc::ReinitReply>& outcome) {
                   if (outcome) {
                     context_.reply(peer, request, *outcome);
                     return;
                   }
                   context_.refuse(peer, request, outcome.error());
                   const std::string name = engine.name();
                   context_.drop_if_unused(name);
                 });
}

// A clear needs nothing, so that nothing may keep it waiting.
void Lifecycle::end_generation_operations(const ipc::Peer& peer, const std::string& name) {
  const auto scope = find_scope(context_.directory, context_.dir, peer, name);
  if (!scope) {
    return;
  }
  const bool refused =
      std::any_of(scope->engines.begin(), scope->engines.end(), [](const EngineRecord* engine) {
        return engine->operation() != EngineOperation::kNone &&
               !is_generation_operation(engine->operation());
      });
  for (EngineRecord* engine : scope->engines) {
    if (!refused && is_generation_operation(engine->operation())) {
      generations_.cancel(
          *engine, KVFERRY_ERROR(kCancelled, "engine {} is being cleared instead", engine->name()));
    }
  }
}

ipc::Result<EngineRecord*> Lifecycle::idle_engine(const ipc::Peer& peer,
                                                  const std::string& name,
                                                  std::string_view command) {
  if (context_.stopping) {
    return KVFERRY_ERROR(kNotReady, "the manager is ending");
  }
  KVFERRY_ASSIGN(const ClearScope scope, idle_scope(peer, name));
  return only_engine(scope, command);
}

ipc::Result<EngineRecord*> Lifecycle::only_engine(const ClearScope& scope,
                                                  std::string_view command) {
  if (scope.engines.empty()) {
    return KVFERRY_ERROR(kNotReady, "no engine is there to {}: start its workers or its client",
                         command);
  }
  if (scope.engines.size() != 1) {
    return KVFERRY_ERROR(kInvalidArgument, "{} is for one engine and there are {}: name it",
                         command, scope.engines.size());
  }
  return scope.engines.front();
}

ipc::Status Lifecycle::check_schedulers(const EngineRecord& engine) const {
  for (const ClientRecord* client : context_.directory.clients_of(engine)) {
    if (!client->schedules) {
      return KVFERRY_ERROR(
          kInvalidArgument,
          "engine {}: its client {} (pid {}) has no scheduler to be ordered about: "
          "connect it with ClientOptions::scheduler",
          engine.name(), client->peer.name, client->peer.pid);
    }
  }
  return ipc::ok();
}

ipc::Status Lifecycle::check_known(const EngineRecord& engine) const {
  if (engine.pause_is_known() || !context_.directory.clients_of(engine).empty()) {
    return ipc::ok();
  }
  return KVFERRY_ERROR(kNotReady,
                       "engine {}: no scheduler has connected to this manager yet, so that it "
                       "is not known whether anything runs: retry when one has, or pause it",
                       engine.name());
}

void Lifecycle::release_memory(const ipc::Peer& peer, const ipc::Envelope& request) {
  auto message = ipc::decode<ipc::ReleaseRequest>(request.body, "ReleaseRequest");
  ipc::Status status =
      message ? check_time(message->deadline, "release deadline", 1) : ipc::Status(message.error());
  if (status) {
    status = check_time(message->timeout, "release timeout", 0);
  }
  if (status) {
    status = message->tags.check();
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  if (message->tags.empty()) {
    message->tags = ipc::MemoryTags::all();
  }
  const auto engine = idle_engine(peer, message->engine, "release");
  status = engine ? check_schedulers(**engine) : ipc::Status(engine.error());
  if (status) {
    status = check_known(**engine);
  }
  if (status) {
    status = GenerationOperations::check_release(**engine, message->tags);
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  generations_.release(peer, request, *message, **engine);
}

void Lifecycle::resume_memory(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto message = ipc::decode<ipc::ResumeRequest>(request.body, "ResumeRequest");
  ipc::Status status =
      message ? check_time(message->deadline, "resume deadline", 1) : ipc::Status(message.error());
  if (status) {
    status = message->tags.check();
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  const auto engine = idle_engine(peer, message->engine, "resume");
  status = engine ? ipc::ok() : ipc::Status(engine.error());
  if (status) {
    const ipc::MemoryTags released = (*engine)->released();
    const ipc::MemoryTags not_released = message->tags - released;
    if (message->tags.empty() ? released.empty() : !not_released.empty()) {
      status = KVFERRY_ERROR(
          kNotReleased, "engine {}: {} is not released ({} is): nothing to resume",
          (*engine)->name(),
          message->tags.empty() ? std::string("its memory") : ipc::to_string(not_released),
          ipc::to_string(released));
    }
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  generations_.take_back(peer, request, *message, **engine);
}

void Lifecycle::components(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto message = ipc::decode<ipc::ComponentsRequest>(request.body, "ComponentsRequest");
  ipc::Status status = message ? check_time(message->deadline, "components deadline", 1)
                               : ipc::Status(message.error());
  if (status) {
    status = message->release.check();
  }
  if (status && context_.stopping) {
    status = KVFERRY_ERROR(kNotReady, "the manager is ending");
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  const auto scope = find_scope(context_.directory, context_.dir, peer, message->engine);
  const auto engine =
      scope ? only_engine(*scope, "components") : ipc::Result<EngineRecord*>(scope.error());
  if (engine && (*engine)->ranks().empty()) {
    status =
        KVFERRY_ERROR(kNotReady, "engine {} has no worker that could have components: start it",
                      (*engine)->name());
  } else if (!engine) {
    status = engine.error();
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  components_.ask(peer, request, *message, **engine);
}

void Lifecycle::pause(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto message = ipc::decode<ipc::PauseRequest>(request.body, "PauseRequest");
  ipc::Status status =
      message ? check_time(message->deadline, "pause deadline", 1) : ipc::Status(message.error());
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  const auto engine = idle_engine(peer, message->engine, "pause");
  status = engine ? check_schedulers(**engine) : ipc::Status(engine.error());
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  generations_.pause(peer, request, *message, **engine);
}

void Lifecycle::resume(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto message = ipc::decode<ipc::ContinueRequest>(request.body, "ContinueRequest");
  ipc::Status status = message ? check_time(message->deadline, "continue deadline", 1)
                               : ipc::Status(message.error());
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  const auto engine = idle_engine(peer, message->engine, "continue");
  status = engine ? ipc::ok() : ipc::Status(engine.error());
  const bool unknown =
      status && !(*engine)->pause_is_known() && context_.directory.clients_of(**engine).empty();
  if (unknown) {
    status = KVFERRY_ERROR(kNotReady,
                           "engine {}: no scheduler has connected to this manager yet, so that it "
                           "is not known whether it is paused: retry when one has",
                           (*engine)->name());
  } else if (status && !(*engine)->paused()) {
    status = KVFERRY_ERROR(kNotPaused, "engine {} is not paused: nothing to continue",
                           (*engine)->name());
  } else if (status && !(*engine)->held_back().empty()) {
    status = KVFERRY_ERROR(kNotReady, "engine {}: its {} is released: resume it first",
                           (*engine)->name(), ipc::to_string((*engine)->held_back()));
  } else if (status && (*engine)->weights_lost()) {
    status = KVFERRY_ERROR(
        kNotReady,
        "engine {}: its weights were released without a backup: update them, then continue",
        (*engine)->name());
  } else if (status && (*engine)->mixed_weights()) {
    status =
        KVFERRY_ERROR(kNotReady,
                      "engine {}: its ranks may have weights that do not belong together ({}): "
                      "update them again first",
                      (*engine)->name(), (*engine)->mixed_weights()->message);
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  generations_.resume(peer, request, *message, **engine);
}

void Lifecycle::flush(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto message = ipc::decode<ipc::FlushRequest>(request.body, "FlushRequest");
  ipc::Status status =
      message ? check_time(message->deadline, "flush deadline", 1) : ipc::Status(message.error());
  if (status) {
    status = check_time(message->timeout, "flush timeout", 0);
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  const auto engine = idle_engine(peer, message->engine, "flush");
  status = engine ? check_schedulers(**engine) : ipc::Status(engine.error());
  if (status && context_.directory.clients_of(**engine).empty()) {
    status = KVFERRY_ERROR(kNotReady,
                           "engine {}: no scheduler is connected that could forget what its blocks "
                           "hold: retry when one has, or clear the cache",
                           (*engine)->name());
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  generations_.flush(peer, request, *message, **engine);
}

void Lifecycle::update_weights(const ipc::Peer& peer, const ipc::Envelope& request) {
  const auto message = ipc::decode<ipc::UpdateWeightsRequest>(request.body, "UpdateWeightsRequest");
  ipc::Status status =
      message ? check_time(message->deadline, "update deadline", 1) : ipc::Status(message.error());
  if (status) {
    status = check_time(message->timeout, "update timeout", 0);
  }
  if (status) {
    status = ipc::check_source(message->source);
  }
  if (status && message->weights && message->weights->is_zero()) {
    status =
        KVFERRY_ERROR(kInvalidArgument, "zero is no identity of weights: name another, or none");
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  const auto engine = idle_engine(peer, message->engine, "update");
  status = engine ? check_schedulers(**engine) : ipc::Status(engine.error());
  if (status) {
    status = check_known(**engine);
  }
  if (status && (*engine)->held_back().has(ipc::MemoryTag::kWeights)) {
    status = KVFERRY_ERROR(kNotReady,
                           "engine {}: its weights are released: resume them, then update them",
                           (*engine)->name());
  }
  if (status && (*engine)->ranks().empty()) {
    status = KVFERRY_ERROR(kNotReady, "engine {} has no worker to update: start them",
                           (*engine)->name());
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  generations_.update_weights(peer, request, *message, **engine);
}

void Lifecycle::weights_part(const ipc::Peer& peer, const ipc::Envelope& request) {
  auto part = ipc::decode<ipc::WeightsPart>(request.body, "WeightsPart");
  ipc::Status status = part ? WeightsUploads::check(*part) : ipc::Status(part.error());
  if (status) {
    const auto engine = idle_engine(peer, part->engine, "send weights");
    if (engine && !(*engine)->ranks().empty()) {
      uploads_.pass_on(peer, request, std::move(*part), **engine);
      return;
    }
    status = engine ? ipc::Status(KVFERRY_ERROR(kNotReady, "engine {} has no worker yet: retry",
                                                (*engine)->name()))
                    : ipc::Status(engine.error());
  }
  context_.refuse(peer, request, status.error());
}

void Lifecycle::cancel_all() {
  const ipc::Error ending =
      KVFERRY_ERROR(kCancelled, "the manager ends; the ranks finish what they were told");
  // A clear or a re-init may be a part of another operation, which ends with it.
  clears_.cancel_all(ending);
  reinits_.cancel_all(ending);
  generations_.cancel_all(ending);
  components_.cancel_all(ending);
}

}  // namespace kvferry::cache_manager
