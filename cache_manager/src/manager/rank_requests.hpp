// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/client_requests.hpp"
#include "manager/context.hpp"
#include "manager/death_proof.hpp"

#include <cstdint>
#include <optional>

namespace kvferry::cache_manager {

/// What workers and movers say: hello, their state, and how a job ended.
/// @threading the loop's thread.
class RankRequests {
 public:
  RankRequests(ManagerContext& context,
               ClientRequests& clients,
               DeathProof& deaths,
               JobService& jobs)
      : context_(context), clients_(clients), deaths_(deaths), jobs_(jobs) {}
  RankRequests(const RankRequests&) = delete;
  RankRequests& operator=(const RankRequests&) = delete;
  ~RankRequests() = default;

  /// False when the kind is none of such a peer's.
  [[nodiscard]] bool handle(const ipc::Peer& peer, const ipc::Envelope& request);

 private:
  void hello(const ipc::Peer& peer, const ipc::Envelope& request);
  void make_way(EngineRecord& engine, const ipc::RankHello& hello) const;
  void state(const ipc::Peer& peer, const ipc::Envelope& request);
  void job_done(const ipc::Peer& peer, const ipc::Envelope& request);
  void sums(const ipc::Peer& peer, const ipc::Envelope& event);
  void kept_sums(const ipc::Peer& peer, const ipc::Envelope& event);
  template <typename Sums> struct Told {
    std::uint32_t rank = 0;
    Sums sums;
  };
  /// By the mover of a rank; others are refused.
  template <typename Sums>
  [[nodiscard]] std::optional<Told<Sums>> told(const ipc::Peer& peer,
                                               const ipc::Envelope& event,
                                               const char* name);

  ManagerContext& context_;
  ClientRequests& clients_;
  DeathProof& deaths_;
  JobService& jobs_;
};

}  // namespace kvferry::cache_manager
