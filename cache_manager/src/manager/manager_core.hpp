// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/manager.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "manager/client_requests.hpp"
#include "manager/context.hpp"
#include "manager/death_proof.hpp"
#include "manager/evict_ahead.hpp"
#include "manager/job_service.hpp"
#include "manager/kv_events.hpp"
#include "manager/lifecycle.hpp"
#include "manager/overdue_jobs.hpp"
#include "manager/pool_adoption.hpp"
#include "manager/rank_requests.hpp"

#include <cstdint>
#include <functional>
#include <optional>

namespace kvferry::cache_manager {

/// The manager: takes what the control server brings, gives it to the part that it is for, and
/// keeps the picture of who lives. @threading the loop's thread. @lifetime loop and pool_fd outlive
/// it.
class ManagerCore : private ipc::ControlHandler {
 public:
  /// pool_fd holds pool.stats().bytes, and the catalogue is told of it. adopts: it is an earlier
  /// manager's. Throws Exception when the names are taken.
  ManagerCore(ipc::EventLoop& loop,
              const ManagerConfig& config,
              const ipc::RuntimeDir& dir,
              HostPool& pool,
              int pool_fd,
              PoolCatalogue& catalogue,
              bool adopts);
  ManagerCore(const ManagerCore&) = delete;
  ManagerCore& operator=(const ManagerCore&) = delete;
  ~ManagerCore() override;

  /// Ends admission, lets running jobs finish for at most a short while, says bye, then calls back.
  /// A second call does not wait any more.
  void begin_stop(std::function<void()> stopped);

 private:
  void on_peer(const ipc::Peer& peer) override;
  void on_message(const ipc::Peer& peer, ipc::Envelope envelope) override;
  void on_peer_silent(const ipc::Peer& peer) override;
  void on_peer_writable(const ipc::Peer& peer) override;
  void on_peer_died(const ipc::Peer& peer) override;
  void on_peer_left(const ipc::Peer& peer) override;

  void dispatch(const ipc::Peer& peer, const ipc::Envelope& envelope);
  /// Of operators and engines; false when the kind is none of theirs.
  [[nodiscard]] bool handle_command(const ipc::Peer& peer, const ipc::Envelope& envelope);
  void on_bye(const ipc::Peer& peer);
  void drop_client(const ipc::IncarnationId& client);

  void engine_changed(EngineRecord& engine);
  [[nodiscard]] ipc::Result<std::vector<RankTarget>> targets(std::uint32_t engine,
                                                             std::uint64_t generation);
  void job_finished(Job& job);
  /// After every event: deadlines and the end of the stop depend on the jobs.
  void after_event();
  void finish_stop();

  /// Its clients know it by this, and its records are under it.
  const ipc::SessionId session_ = ipc::SessionId::random();
  const ManagerConfig config_;
  const ipc::RuntimeDir dir_;
  const ipc::TransitionLog transitions_;
  ipc::EventLoop& loop_;
  HostPool& pool_;
  ipc::TimePoint started_;
  EngineDirectory directory_;
  PrefixIndex index_;
  SequenceStore sequences_;  ///< After the pool: its blocks go back there.
  HostTier host_;
  std::optional<KvEvents> kv_events_;
  ipc::ControlServer server_;
  PeerCalls calls_;
  JobTable jobs_;
  ManagerContext context_;
  JobService job_service_;
  ClientRequests clients_;
  DeathProof deaths_;
  RankRequests ranks_;
  Lifecycle lifecycle_;
  OverdueJobs overdue_;
  EvictAhead ahead_;
  std::optional<PoolAdoption> adoption_;
  ipc::TimerId stop_timer_ = 0;
  bool orphan_check_posted_ = false;
  std::function<void()> stopped_;
};

}  // namespace kvferry::cache_manager
