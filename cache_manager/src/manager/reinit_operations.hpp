// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/context.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace kvferry::cache_manager {

/// The re-inits that run: each tells every rank that is not mapped, its owner first, waits for
/// every answer and for the state reports that say so, and is done once. @threading the loop's
/// thread.
class ReinitOperations {
 public:
  struct Order {
    ipc::Peer by;
    std::uint32_t gpu_blocks = 0;  ///< 0: as before.
    std::chrono::milliseconds deadline{};
  };
  using Done = std::function<void(const ipc::Result<ipc::ReinitReply>& outcome)>;

  /// margin: what a rank may take beyond a re-init's deadline.
  ReinitOperations(ManagerContext& context, std::chrono::milliseconds margin)
      : context_(context), margin_(margin) {}
  ReinitOperations(const ReinitOperations&) = delete;
  ReinitOperations& operator=(const ReinitOperations&) = delete;
  ~ReinitOperations() = default;

  /// Whether the engine's processes are all there and something is left to do.
  [[nodiscard]] ipc::Status check(const EngineRecord& engine) const;
  /// The engine has passed check() and runs no other operation than this one, or the one that this
  /// is a part of: that goes on after it.
  void start(const Order& wanted, EngineRecord& engine, Done done);
  /// A re-init that has all answers waits for the ranks' state reports.
  void on_engine_changed(const EngineRecord& engine);
  /// Ends those that run; what the ranks still say is not waited for.
  void cancel_all(const ipc::Error& why);

 private:
  struct Reinit {
    ipc::Peer by;
    Done done;
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
