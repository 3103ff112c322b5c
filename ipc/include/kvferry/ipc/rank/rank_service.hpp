// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/rank/component_user.hpp"
#include "kvferry/ipc/rank/emptied_cache.hpp"
#include "kvferry/ipc/rank/memory_user.hpp"
#include "kvferry/ipc/rank/rank_config.hpp"
#include "kvferry/ipc/rank/weights_user.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <functional>
#include <memory>

namespace kvferry::ipc {

/// Where a worker or a mover records its transitions; an empty log, with a warning, when there can
/// be none.
[[nodiscard]] TransitionLog open_transitions(const RankConfig& config,
                                             ProcessKind kind,
                                             const RuntimeDir& dir);

/// What worker and mover have in common, whatever their role: the lease (owner or attacher), the
/// link to the manager with reconnects, the one clear and the one re-init, state reports.
/// Clears and re-inits run on a thread of their own, one at a time.
/// @threading constructor, destructor and send() on the loop's thread; hooks are called there.
/// @lifetime loop, device, user and source outlive it. The destructor ends the arena (bounded) and
/// says bye.
class RankService {
 public:
  struct Hooks {
    /// Messages of the manager other than clear and re-init.
    std::function<void(Envelope)> on_message;
    /// Connected (again) and accepted; movers get the pool. Called before any message.
    std::function<void(const RegistryWelcome&, PoolMemory)> on_manager;
    /// The manager is dead or gone: finish what runs, accept nothing new, let go of its pool.
    std::function<void()> on_manager_lost;
    /// Asked before each attempt to connect: false while work of a lost manager still runs. A new
    /// manager may therefore take a connected mover's silence about old jobs as their end.
    std::function<bool()> may_connect;
    /// The lease's picture changed. On the lease thread, to the very end: also after the loop's own
    /// hooks have fallen silent.
    std::function<void(const LeaseView&)> on_lease;
    /// Empties the caching device allocator: part of every clear, in both roles, after the regions
    /// are gone and before anybody is told that they are; also when the manager asks for it. Called
    /// on the lease's thread, on the clearing one and on the one for upkeep, maybe at a time.
    EmptyAllocator empty_allocator;
    /// A worker's weights and what they are known by; null and zero for none.
    WeightsUser* weights = nullptr;
    Digest weights_id{};
    /// What a worker releases and resumes beside the arena; null for nothing.
    MemoryUser* memory = nullptr;
    /// A worker's components beside the arena; null for none.
    ComponentUser* components = nullptr;
    /// A refusal that no retry can mend (role, geometry, version, a living process of the same kind
    /// on the same rank that does not end within seconds), or no device memory for the first epoch
    /// in time: the process should end.
    std::function<void(const Error&)> on_fatal;
  };

  /// Throws Exception when the lease cannot be set up. The owner allocates its first epoch at once,
  /// manager or not; a failure to do so is thrown, except for memory that is still taken: an
  /// earlier life's arena is pinned until its peer has let go, so that the owner tries again for a
  /// while, from the loop. source: an engine's memory for the arena, null for none;
  /// kInvalidArgument unless this process is a worker that owns the cache.
  RankService(EventLoop& loop,
              const RankConfig& config,
              ProcessKind kind,
              Device& device,
              TransitionLog transitions,
              ArenaUser& user,
              Hooks hooks,
              ArenaSource* source = nullptr);
  RankService(const RankService&) = delete;
  RankService& operator=(const RankService&) = delete;
  ~RankService();

  /// kNoManager while there is none.
  [[nodiscard]] Status send(const Envelope& envelope);
  template <typename T> Status notify(MessageKind kind, const T& body) {
    Envelope envelope;
    envelope.kind = kind;
    envelope.body = encode(body);
    return send(envelope);
  }
  template <typename T> Status reply(const Envelope& request, const T& body) {
    Envelope envelope;
    envelope.kind = request.kind;
    envelope.request = request.request;
    envelope.is_reply = true;
    envelope.body = encode(body);
    return send(envelope);
  }
  Status reply_error(const Envelope& request, Error error);

  [[nodiscard]] const IncarnationId& incarnation() const noexcept;
  [[nodiscard]] LeaseView view() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::ipc
