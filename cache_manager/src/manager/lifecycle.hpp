// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/clear_operations.hpp"
#include "manager/component_calls.hpp"
#include "manager/context.hpp"
#include "manager/generation_operations.hpp"
#include "manager/reinit_operations.hpp"
#include "manager/weights_uploads.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cache_manager {

/// What a rank may take beyond a clear's deadline: to end a mover, which has the whole pool pinned,
/// and to prove that its memory is back.
[[nodiscard]] std::chrono::milliseconds clear_margin(std::uint64_t pool_bytes);

/// Clear, re-init, pause, continue, flush, updates of weights, release and resume, as operators and
/// engines ask for them: checks what is asked, finds the engines that it is for and starts it. One
/// operation per engine at a time, beside looks at components; a clear takes the place of a pause,
/// continue or flush that runs.
/// @threading the loop's thread.
class Lifecycle {
 public:
  explicit Lifecycle(ManagerContext& context)
      : context_(context),
        clears_(context, clear_margin(context.pool.stats().bytes)),
        reinits_(context, clear_margin(context.pool.stats().bytes)),
        generations_(context, clears_, reinits_),
        uploads_(context),
        components_(context) {}
  Lifecycle(const Lifecycle&) = delete;
  Lifecycle& operator=(const Lifecycle&) = delete;
  ~Lifecycle() = default;

  void clear(const ipc::Peer& peer, const ipc::Envelope& request);
  void reinit(const ipc::Peer& peer, const ipc::Envelope& request);
  void pause(const ipc::Peer& peer, const ipc::Envelope& request);
  void resume(const ipc::Peer& peer, const ipc::Envelope& request);
  void flush(const ipc::Peer& peer, const ipc::Envelope& request);
  void update_weights(const ipc::Peer& peer, const ipc::Envelope& request);
  void release_memory(const ipc::Peer& peer, const ipc::Envelope& request);
  void resume_memory(const ipc::Peer& peer, const ipc::Envelope& request);
  /// Runs beside all of the others.
  void components(const ipc::Peer& peer, const ipc::Envelope& request);
  void weights_part(const ipc::Peer& peer, const ipc::Envelope& request);
  /// A client has come; paused: the pause that it obeys.
  void on_scheduler(const ClientRecord& client,
                    std::optional<ipc::PauseMode> paused,
                    bool by_release) {
    generations_.on_scheduler(client, paused, by_release);
  }
  /// A flush may be waiting for jobs that have ended.
  void on_jobs_changed() { generations_.on_jobs_changed(); }
  /// It has died, or closed its connection.
  void on_peer_gone(const ipc::IncarnationId& peer) {
    generations_.on_peer_gone(peer);
    uploads_.on_peer_gone(peer);
  }
  /// A re-init that has all answers waits for the ranks' state reports.
  void on_engine_changed(const EngineRecord& engine) { reinits_.on_engine_changed(engine); }
  /// Answers the operations that run: the manager ends.
  void cancel_all();

 private:
  /// find_scope, and none of its engines runs an operation.
  [[nodiscard]] ipc::Result<ClearScope> idle_scope(const ipc::Peer& peer, const std::string& name);
  void answer_clear(const ipc::Peer& peer,
                    const ipc::Envelope& request,
                    const ClearOperations::Outcome& outcome) const;
  void end_generation_operations(const ipc::Peer& peer, const std::string& name);
  /// The one engine that a peer means, which runs no operation.
  [[nodiscard]] ipc::Result<EngineRecord*> idle_engine(const ipc::Peer& peer,
                                                       const std::string& name,
                                                       std::string_view command);
  /// The one that a command is for.
  [[nodiscard]] static ipc::Result<EngineRecord*> only_engine(const ClearScope& scope,
                                                              std::string_view command);
  /// It is known whether anything runs: from this manager's own orders, or a scheduler.
  [[nodiscard]] ipc::Status check_known(const EngineRecord& engine) const;
  /// Every client of the engine has a scheduler to be ordered about.
  [[nodiscard]] ipc::Status check_schedulers(const EngineRecord& engine) const;

  ManagerContext& context_;
  ClearOperations clears_;
  ReinitOperations reinits_;
  GenerationOperations generations_;
  WeightsUploads uploads_;
  ComponentCalls components_;
};

}  // namespace kvferry::cache_manager
