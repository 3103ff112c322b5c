// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/lifecycle_commands.hpp"

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "rank/reply_to.hpp"

#include <chrono>
#include <utility>

namespace kvferry::ipc {
namespace {

template <typename T> Envelope answer(const Envelope& request, Result<T> outcome) {
  Envelope reply = reply_to(request);
  if (outcome) {
    reply.body = encode(*outcome);
  } else {
    log_warn("command {} refused: {}", static_cast<int>(request.kind), outcome.error().to_string());
    reply.error = std::move(outcome).error();
  }
  return reply;
}

}  // namespace

bool LifecycleCommands::is_command(const Envelope& envelope) noexcept {
  return !envelope.is_reply &&
         (envelope.kind == MessageKind::kRankClear || envelope.kind == MessageKind::kRankReinit);
}

LifecycleCommands::Answer LifecycleCommands::run(const Envelope& request) {
  Answer done;
  done.reply = request.kind == MessageKind::kRankClear
                   ? answer(request, clear(request, done.memory))
                   : answer(request, reinit(request));
  return done;
}

Result<RankClearReply> LifecycleCommands::clear(const Envelope& request,
                                                std::optional<MemoryInfo>& memory) {
  KVFERRY_ASSIGN(const auto command, decode<RankClear>(request.body, "RankClear"));
  auto outcome = lease_.clear(command);
  // Also where no region went: a clear that could not free them, or found none, frees what it can.
  if (!user_.take_emptied_for_clear()) user_.empty_for_clear();
  if (!outcome) return std::move(outcome).error();
  RankClearReply reply;
  reply.kind = outcome->kind;
  reply.epoch = outcome->epoch;
  reply.detail = outcome->detail;
  reply.quarantined_bytes = outcome->quarantined_bytes;
  reply.free_before = outcome->before.free_bytes;
  reply.free_after = outcome->after.free_bytes;
  if (user_.has_allocator()) {
    // It gave back more than the epoch.
    if (const auto seen = device_.memory_info(); seen) {
      reply.free_after = seen->free_bytes;
      memory = *seen;
    }
  }
  reply.took = outcome->took;
  return reply;
}

Result<RankReinitReply> LifecycleCommands::reinit(const Envelope& request) {
  KVFERRY_ASSIGN(const auto command, decode<RankReinit>(request.body, "RankReinit"));
  const TimePoint start = MonotonicClock::now();
  KVFERRY_ASSIGN(const Epoch epoch, lease_.reinit(command));
  RankReinitReply reply;
  reply.session = lease_.view().session;
  reply.epoch = epoch;
  reply.took = std::chrono::duration_cast<std::chrono::microseconds>(MonotonicClock::now() - start);
  return reply;
}

}  // namespace kvferry::ipc
