// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "manager/context.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cache_manager {

/// What a rank may take beyond a clear's deadline: to end a mover, which has the whole pool pinned,
/// and to prove that its memory is back.
[[nodiscard]] std::chrono::milliseconds clear_margin(std::uint64_t pool_bytes);

/// Lifecycle rows 2 and 3 over all ranks of an engine: sends the idempotent per-rank commands to
/// owners and attachers alike, waits for every answer (or its death, or its deadline) and
/// aggregates. One operation per engine at a time. @threading the loop's thread.
class Lifecycle {
 public:
  explicit Lifecycle(ManagerContext& context)
      : context_(context), margin_(clear_margin(context.pool.stats().bytes)) {}
  Lifecycle(const Lifecycle&) = delete;
  Lifecycle& operator=(const Lifecycle&) = delete;
  ~Lifecycle() = default;

  void clear(const ipc::Peer& peer, const ipc::Envelope& request);
  void reinit(const ipc::Peer& peer, const ipc::Envelope& request);
  /// A re-init that has all answers waits for the ranks' state reports.
  void on_engine_changed(const EngineRecord& engine);
  /// Answers the operations that run: the manager ends.
  void cancel_all();

 private:
  struct ClearRank {
    std::string engine;
    ipc::Rank rank;
    std::optional<ipc::RankClearReply> outcome;  ///< The owner's.
    std::optional<ipc::Error> error;
    std::string attacher_note;
    // The attacher may be the first or the last one that gives memory back. 0: not known.
    std::uint64_t attacher_free_before = 0;
    std::uint64_t attacher_free_after = 0;
    bool attacher_open = false;  ///< Asked, and its answer is waited for.
    bool attacher_failed = false;
    bool again = false;  ///< There was nothing left to clear.
  };
  struct Clear {
    ipc::Peer peer;
    ipc::Envelope request;
    ipc::HostPolicy host = ipc::HostPolicy::kDrop;
    ipc::TimePoint start;
    std::vector<EngineRecord*> engines;  ///< Operations keep their engines alive.
    std::vector<ClearRank> ranks;
    std::size_t pending = 0;
    bool answered = false;
  };
  struct Reinit {
    ipc::Peer peer;
    ipc::Envelope request;
    ipc::TimePoint start;
    ipc::TimePoint give_up;
    EngineRecord* engine = nullptr;
    std::size_t pending = 0;
    std::optional<ipc::Error> error;
    ipc::TimerId timer = 0;
    bool waits_for_ready = false;
    bool answered = false;
  };
  using ClearRef = std::shared_ptr<Clear>;    // Shared by the answers that are outstanding.
  using ReinitRef = std::shared_ptr<Reinit>;  // Likewise.

  [[nodiscard]] ipc::Result<std::vector<EngineRecord*>> engines_for(const ipc::Peer& peer,
                                                                    const std::string& name);
  void start_clear(const ClearRef& clear, EngineRecord& engine, ipc::Duration deadline);
  void send_clear(const ClearRef& clear,
                  std::size_t index,
                  const RankPeer& target,
                  bool is_owner,
                  ipc::Duration deadline);
  void on_clear_answer(const ClearRef& clear,
                       std::size_t index,
                       bool is_owner,
                       const ipc::RankState& asked,
                       const ipc::Result<ipc::Envelope>& answer);
  /// The owner has answered: what it says holds, the attacher's answer is waited for a little only.
  void limit_attacher(const ClearRef& clear, std::size_t index);
  [[nodiscard]] static std::optional<ipc::Error> collect_outcomes(Clear& clear,
                                                                  ipc::ClearReply& reply);
  void finish_clear(const ClearRef& clear);

  [[nodiscard]] ipc::Status check_reinit(const EngineRecord& engine) const;
  void reinit_owner(const ReinitRef& reinit,
                    std::uint32_t rank,
                    const ipc::IncarnationId& owner,
                    const ipc::RankReinit& order);
  void reinit_attacher(const ReinitRef& reinit, std::uint32_t rank, const ipc::RankReinit& order);
  void finish_reinit(const ReinitRef& reinit);

  ManagerContext& context_;
  std::chrono::milliseconds margin_;
  std::vector<ClearRef> clears_;
  std::vector<ReinitRef> reinits_;
};

}  // namespace kvferry::cache_manager
