// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/log_gate.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/rank/compute_activity.hpp"
#include "kvferry/ipc/rank/rank_config.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "kvferry/ipc/wire/staging_messages.hpp"
#include "kvferry/worker/copy_budget.hpp"
#include "kvferry/worker/layer_words.hpp"
#include "lent_pools.hpp"
#include "stream_completions.hpp"
#include "worker_arena.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <vector>

namespace kvferry::worker {

/// Gathers and scatters for movers, on a high-priority stream of the worker's process: a kernel
/// from another process would stop the compute. Requests come over a socket, are checked without
/// trust, and are answered after the work was observed complete. One connection per lane is served:
/// the next one is greeted when nothing of those before it runs any more. A mover may lend its host
/// pool: small swaps go straight there then, without a copy of the mover's. When the device has
/// failed nothing is answered any more, nor greeted or said to be quiesced: what it runs may still
/// write, until this process is dead.
/// @threading its loop's thread.
class StagingAgent {
 public:
  static constexpr std::size_t kMaxInFlight = 16;
  /// Of those that wait for compute, beside the others.
  static constexpr std::size_t kMaxAwaiting = 16;
  static constexpr std::size_t kMaxQueued = 4096;
  using Quiesced = std::function<void(ipc::Status)>;

  /// Throws Exception: the name is taken by a living worker, or the device refuses a stream.
  StagingAgent(ipc::EventLoop& loop,
               const ipc::RuntimeDir& dir,
               const ipc::RankConfig& config,
               ipc::Device& device,
               WorkerArena& arena,
               LayerWords& layers,
               const ipc::ComputeActivity& activity,
               const CopyBudget& budget,
               ipc::TransitionLog transitions,
               StreamCompletions::Failed on_device_failed);
  StagingAgent(const StagingAgent&) = delete;
  StagingAgent& operator=(const StagingAgent&) = delete;
  ~StagingAgent();

  /// The epoch is being revoked: queued requests end as kRevoked.
  void on_revoked();
  /// A use of a layer slot began or failed.
  void look_at_layers();
  /// Ends the connections of the movers meant, with what they sent and is unread or queued, and
  /// calls back once nothing asked by them runs any more, or with kTimeout. A single one is dead
  /// and shut out for good.
  void quiesce(const ipc::QuiesceStaging& request, ipc::Deadline deadline, Quiesced quiesced);

 private:
  struct Connection {
    std::uint64_t id = 0;
    ipc::PacketSocket socket;
    ipc::IncarnationId mover;  ///< Zero before its hello.
    ipc::TimerId hello_timer = 0;
    std::uint32_t lane = 0;
    bool welcome = false;            ///< Its hello was answered: it may ask.
    std::uint64_t last_request = 0;  ///< Numbers grow, so that each names one request.
    ipc::Result<std::shared_ptr<ipc::PoolMapping>> pool = std::shared_ptr<ipc::PoolMapping>();
    /// Uses of layer slots, by slot, whose transfers it has begun and not finished.
    std::map<std::uint32_t, ipc::LayerTicket> tickets;
  };
  struct Request {
    std::uint64_t connection = 0;
    ipc::IncarnationId mover;
    std::uint32_t lane = 0;
    ipc::StageRequest stage;
    /// Its connection's, when it came.
    ipc::Result<std::shared_ptr<ipc::PoolMapping>> pool = std::shared_ptr<ipc::PoolMapping>();
    bool is_pinning = false;  ///< Memory that it names is being registered.
    /// It begins when the worker's compute has got somewhere, which nobody may wait behind.
    [[nodiscard]] bool awaits_compute() const noexcept {
      return stage.layers &&
             (stage.kind == ipc::StageKind::kGather || stage.kind == ipc::StageKind::kAwait);
    }
  };
  struct InFlight {
    std::uint64_t connection = 0;
    ipc::IncarnationId mover;
    std::uint32_t lane = 0;
    std::uint64_t id = 0;
    bool awaits_compute = false;
    std::optional<ipc::StageLayers> layers;
    std::unique_ptr<ipc::RegionTable> table;  ///< Of those layers.
    std::shared_ptr<ipc::PoolMapping> pool;
    ArenaUse use;
    std::optional<ipc::Error> error;
  };
  struct Waiter {
    std::uint64_t id = 0;
    ipc::QuiesceStaging request;
    ipc::TimerId timer = 0;
    Quiesced quiesced;
  };

  void on_connect();
  void warn(const std::string& text);
  void on_silent(std::uint64_t connection);
  void on_readable(std::uint64_t connection);
  [[nodiscard]] ipc::Status on_packet(Connection& connection, ipc::Packet packet);
  [[nodiscard]] ipc::Status on_hello(Connection& connection, const ipc::Packet& packet);
  [[nodiscard]] ipc::Status on_pool(Connection& connection,
                                    const ipc::StageRequest& stage,
                                    ipc::Packet packet);
  [[nodiscard]] ipc::Status check_hello(const ipc::AgentHello& hello,
                                        const Connection& connection) const;
  /// Other connections' launches on the connection's lane that have not ended.
  [[nodiscard]] std::size_t left_on_lane(const Connection& connection) const;
  void welcome_waiting();
  Connection* find(std::uint64_t connection);
  void drop(std::uint64_t connection, std::string_view why);
  void start_queued();
  [[nodiscard]] bool has_room_for(const Request& request) const;
  void start(Request request);
  [[nodiscard]] ipc::Status enter_layers(const Request& request);
  [[nodiscard]] ipc::Status launch(const Request& request, InFlight& work);
  [[nodiscard]] ipc::Status launch_kernel(const ipc::StageRequest& stage, InFlight& work);
  /// Whether all memory of a straight request is registered.
  [[nodiscard]] static bool is_pinned(const Request& request,
                                      const ipc::PoolMapping& pool,
                                      const MappedArena& arena);
  void pin(Request request, const MappedArena& arena);
  void on_pinned(std::uint64_t connection, std::uint64_t id, const ipc::Status& status);
  [[nodiscard]] ipc::Status launch_straight(const ipc::StageRequest& stage, InFlight& work);
  [[nodiscard]] StreamCompletions& stream_of(const InFlight& work) noexcept {
    return work.awaits_compute ? behind_compute_ : completions_;
  }
  void finish(std::list<InFlight>::iterator work, const ipc::Status& status);
  void lose_track(std::list<InFlight>::iterator work, const ipc::Error& error);
  /// What it was asked by a connection that is gone goes on, but nobody sees to the rest.
  void fail_layers(const Connection& connection, std::string_view why);
  void answer(std::uint64_t connection, std::uint64_t id, std::optional<ipc::Error> error);
  void say_quiesced(const ipc::QuiesceStaging& request, const Quiesced& quiesced) const;
  [[nodiscard]] std::size_t running(const ipc::QuiesceStaging& request) const;
  [[nodiscard]] bool is_fenced(const ipc::IncarnationId& mover) const;
  void settle_waiters();

  ipc::EventLoop& loop_;
  const ipc::RankConfig config_;
  ipc::Device& device_;
  WorkerArena& arena_;
  LayerWords& layers_;
  const ipc::ComputeActivity& activity_;
  const CopyBudget budget_;
  ipc::TimerId layers_timer_ = 0;
  const ipc::TransitionLog transitions_;
  LentPools pools_;  ///< Before those who use them.
  std::list<InFlight> in_flight_;
  StreamCompletions completions_;
  StreamCompletions behind_compute_;  ///< A stream of its own, which stands still for long.
  ipc::PacketListener listener_;
  ipc::LogGate log_gate_;
  ipc::TimerId accept_pause_ = 0;  ///< Armed while the listener is not watched.
  std::list<Connection> connections_;
  std::deque<Request> queue_;
  std::list<Waiter> waiters_;
  std::deque<ipc::IncarnationId> fenced_;  ///< Dead movers, newest last; bounded.
  std::uint64_t next_id_ = 1;
  std::optional<ipc::Error> device_failure_;  ///< Nothing shows any more what runs.
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< Shared with posted calls only.
};

}  // namespace kvferry::worker
