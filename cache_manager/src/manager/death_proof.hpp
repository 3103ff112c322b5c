// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "manager/context.hpp"

#include <map>
#include <set>

namespace kvferry::cache_manager {

/// What has to be proven after a mover's death before its jobs may end: that no staging agent works
/// on its behalf any more. The mover is dead already (the kernel said so); the worker has to answer
/// a quiesce or be dead, too. A worker that does neither is asked again: its blocks stay taken.
///
/// And before a mover's first job: that its worker runs nothing of any other mover. One may have
/// died, or have been given up, while no manager was there to see it.
/// @threading the loop's thread.
class DeathProof {
 public:
  explicit DeathProof(ManagerContext& context) : context_(context) {}
  DeathProof(const DeathProof&) = delete;
  DeathProof& operator=(const DeathProof&) = delete;
  ~DeathProof() = default;

  /// A worker has registered: keeps a proof of its life of our own, which outlasts its connection.
  void watch_worker(const ipc::IncarnationId& worker);
  void mover_died(const ipc::IncarnationId& mover);
  void worker_died(const ipc::IncarnationId& worker);
  /// Gets the proof for every rank that lacks nothing else.
  void settle(const EngineRecord& engine);
  /// Proofs that are waited for.
  [[nodiscard]] std::size_t open() const noexcept { return open_.size() + settling_.size(); }

 private:
  using Pair = RankPair;

  [[nodiscard]] bool is_living(const ipc::IncarnationId& worker) const;
  void note_death(const ipc::IncarnationId& worker);
  void ask(const Pair& pair);
  void proven(const Pair& pair);
  void ask_to_settle(const Pair& pair);
  void on_settle_answer(const Pair& pair, const ipc::Result<ipc::Envelope>& answer);

  ManagerContext& context_;
  std::map<ipc::IncarnationId, ipc::ProcessRef> workers_;
  std::set<Pair> open_;
  std::set<Pair> settling_;
};

}  // namespace kvferry::cache_manager
