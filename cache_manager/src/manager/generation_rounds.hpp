// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/generation_operations.hpp"

#include <utility>

namespace kvferry::cache_manager {

/// A round of one question to the worker of every rank; a rank without one answers kPeerDied.
template <typename Body>
void GenerationOperations::ask_workers(const OperationRef& operation,
                                       ipc::MessageKind kind,
                                       const Body& body,
                                       RankAnswered answered,
                                       std::function<void()> next) {
  operation->next = std::move(next);
  const auto& ranks = operation->engine->ranks();
  operation->pending = 1;  // Held until everything is sent.
  for (std::uint32_t rank = 0; rank < ranks.size(); ++rank) {
    ask_rank(operation, rank, kind, body, answered);
  }
  end_round(operation);
}

/// One of a round that was begun.
template <typename Body>
void GenerationOperations::ask_rank(const OperationRef& operation,
                                    std::uint32_t rank,
                                    ipc::MessageKind kind,
                                    const Body& body,
                                    const RankAnswered& answered) {
  const std::optional<RankPeer>& worker = operation->engine->ranks()[rank].worker;
  if (!worker) {
    answered(rank, KVFERRY_ERROR(kPeerDied, "it has no worker: start it, and ask again"));
    return;
  }
  if (!worker->connected) {
    answered(rank, KVFERRY_ERROR(kNotReady,
                                 "its worker (pid {}) has closed its connection and lives: wait "
                                 "until it is back or has ended, and ask again",
                                 worker->pid));
    return;
  }
  ++operation->pending;
  context_.calls.call(worker->id, kind, body, ipc::Deadline::at(operation->give_up),
                      [operation, rank, answered](const ipc::Result<ipc::Envelope>& answer) {
                        if (!operation->answered) {
                          answered(rank, answer);
                          end_round(operation);
                        }
                      });
}

/// With its error, when there is one: the reply says then what each rank came to.
template <typename Reply>
void GenerationOperations::answer(const Operation& operation, const Reply& reply) const {
  if (!operation.error) {
    context_.reply(operation.peer, operation.request, reply);
  } else if (operation.request.request.value != 0) {
    ManagerContext::log_unsent(
        operation.peer, context_.server.reply_partial(operation.peer.id, operation.request, reply,
                                                      *operation.error));
  }
}

}  // namespace kvferry::cache_manager
