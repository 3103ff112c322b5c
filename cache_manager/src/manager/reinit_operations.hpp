// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/context.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace kvferry::cache_manager {

/// The re-inits that run: each tells every rank that is not mapped, its owner first, waits for
/// every answer and for the state reports that say so, and answers once. @threading the loop's
/// thread.
class ReinitOperations {
 public:
  /// margin: what a rank may take beyond a re-init's deadline.
  ReinitOperations(ManagerContext& context, std::chrono::milliseconds margin)
      : context_(context), margin_(margin) {}
  ReinitOperations(const ReinitOperations&) = delete;
  ReinitOperations& operator=(const ReinitOperations&) = delete;
  ~ReinitOperations() = default;

  /// Whether the engine's processes are all there and something is left to do.
  [[nodiscard]] ipc::Status check(const EngineRecord& engine) const;
  /// The engine has passed check() and runs no other operation.
  void start(const ipc::Peer& peer,
             const ipc::Envelope& request,
             const ipc::ReinitRequest& message,
             EngineRecord& engine);
  /// A re-init that has all answers waits for the ranks' state reports.
  void on_engine_changed(const EngineRecord& engine);
  /// Answers those that run; what the ranks still say is not waited for.
  void cancel_all(const ipc::Error& why);

 private:
  struct Reinit {
    ipc::Peer peer;
    ipc::Envelope request;
    ipc::LeaseId operation;
    ipc::TimePoint start;
    ipc::TimePoint give_up;
    EngineRecord* engine = nullptr;
    std::size_t pending = 0;
    std::optional<ipc::Error> error;
    ipc::TimerId timer = 0;
    bool waits_for_ready = false;
    bool answered = false;
  };
  using ReinitRef = std::shared_ptr<Reinit>;  // Shared by the answers that are outstanding.

  void reinit_owner(const ReinitRef& reinit,
                    std::uint32_t rank,
                    const ipc::IncarnationId& owner,
                    const ipc::RankReinit& order);
  void reinit_attacher(const ReinitRef& reinit, std::uint32_t rank, const ipc::RankReinit& order);
  void record(ipc::Transition transition,
              const Reinit& reinit,
              const ipc::RankReinit& order,
              const ipc::IncarnationId& peer,
              std::uint64_t detail = 0) const;
  void finish_reinit(const ReinitRef& reinit);

  ManagerContext& context_;
  std::chrono::milliseconds margin_;
  std::vector<ReinitRef> reinits_;
};

}  // namespace kvferry::cache_manager
