// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/lifecycle.hpp"

#include <chrono>
#include <utility>

namespace kvferry::cache_manager {
namespace {

constexpr std::chrono::milliseconds kAnswerMargin{5000};
constexpr std::chrono::milliseconds kLongestDeadline{600'000};

}  // namespace

std::chrono::milliseconds clear_margin(std::uint64_t pool_bytes) {
  const ipc::LeaseTimeouts timeouts;
  const std::uint64_t pinned_gib = (pool_bytes >> 30U) + 1;
  return timeouts.kill + pinned_gib * timeouts.kill_per_pinned_gib + 2 * timeouts.settle +
         kAnswerMargin;
}

ipc::Result<ClearScope> Lifecycle::idle_scope(const ipc::Peer& peer, const std::string& name) {
  auto scope = find_scope(context_.directory, context_.dir, peer, name);
  if (!scope) {
    return scope;
  }
  for (const EngineRecord* engine : scope->engines) {
    if (engine->operation() != EngineOperation::kNone) {
      return KVFERRY_ERROR(kBusy, "engine {} runs a {} already: retry when it is over",
                           engine->name(),
                           engine->operation() == EngineOperation::kClear ? "clear" : "reinit");
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
  if (message->deadline.count() <= 0 || message->deadline > kLongestDeadline) {
    context_.refuse(peer, request,
                    KVFERRY_ERROR(kInvalidArgument, "clear deadline of {} ms: give 1 to {} ms",
                                  message->deadline.count(), kLongestDeadline.count()));
    return;
  }
  auto scope = idle_scope(peer, message->engine);
  if (!scope) {
    context_.refuse(peer, request, scope.error());
    return;
  }
  clears_.start(peer, request, *message, std::move(scope).value());
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
  if (status && (message->deadline.count() <= 0 || message->deadline > kLongestDeadline)) {
    status = KVFERRY_ERROR(kInvalidArgument, "reinit deadline of {} ms: give 1 to {} ms",
                           message->deadline.count(), kLongestDeadline.count());
  }
  if (status) {
    status = reinits_.check(*scope->engines.front());
  }
  if (!status) {
    context_.refuse(peer, request, status.error());
    return;
  }
  reinits_.start(peer, request, *message, *scope->engines.front());
}

void Lifecycle::cancel_all() {
  const ipc::Error ending =
      KVFERRY_ERROR(kCancelled, "the manager ends; the ranks finish what they were told");
  clears_.cancel_all(ending);
  reinits_.cancel_all(ending);
}

}  // namespace kvferry::cache_manager
