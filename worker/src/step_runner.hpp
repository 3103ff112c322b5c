// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "decode_graph.hpp"
#include "decode_launch.hpp"
#include "idle_trim.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/rank/compute_activity.hpp"
#include "kvferry/ipc/rank/memory_user.hpp"
#include "kvferry/ipc/rank/rank_config.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/worker/arena_use.hpp"
#include "kvferry/worker/caching_allocator.hpp"
#include "kvferry/worker/layer_words.hpp"
#include "kvferry/worker/step_guard.hpp"
#include "model_tables.hpp"
#include "pinned_pool.hpp"
#include "step_plan.hpp"
#include "stream_completions.hpp"

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

namespace kvferry::worker {

/// The reference runner: serves steps of engines (fills, reads, verifies) and passes of the
/// reference model on the compute stream. Several steps are in flight at once; each is answered
/// after its work was observed complete, in order. A step that fails is answered with its error,
/// and the runner serves on.
/// @threading its loop's thread.
class StepRunner final : public ipc::ControlHandler {
 public:
  static constexpr std::size_t kMaxInFlight = 8;
  static constexpr std::size_t kMaxQueued = 1024;

  /// Permission to work on an epoch of the arena: RegisteredWorker::enter().
  using Enter = std::function<ipc::Result<ArenaUse>(const ipc::SessionId&, ipc::Epoch)>;

  /// graph_bytes: of the decode graph's buffers, for others to see; outlives this. idle_trim:
  /// without a step for so long, the allocator is emptied; zero for never. Throws Exception: the
  /// names are taken by a living worker, or the device refuses a stream.
  StepRunner(ipc::EventLoop& loop,
             const ipc::RuntimeDir& dir,
             const ipc::RankConfig& config,
             ipc::Duration idle_trim,
             ipc::Device& device,
             Enter enter,
             CachingAllocator& allocator,
             ModelTables& tables,
             LayerWords& layers,
             ipc::ComputeActivity& activity,
             std::atomic<std::uint64_t>& graph_bytes,
             StreamCompletions::Failed on_device_failed);

  /// The epoch is being revoked: queued steps end as kRevoked.
  void on_revoked();

  /// From now on steps are refused, until every released tag has been resumed; gives up the memory
  /// of kScratch. Returns its bytes. kBusy while steps run.
  [[nodiscard]] ipc::Result<std::uint64_t> release(ipc::MemoryTag tag);
  /// Takes that memory again; after an error the tag is still released.
  [[nodiscard]] ipc::Result<std::uint64_t> resume(ipc::MemoryTag tag);

  /// Runs a call as soon as no launch of the decode graph is under way: at once, or when the one
  /// that is has ended. It is dropped when the runner ends before.
  void when_graph_rests(std::function<void()> call);
  /// Gives up the decode graph's memory; the next pass that it computes takes it again.
  /// @pre none of its launches is under way
  void release_graph();

  void on_peer(const ipc::Peer& peer) override;
  void on_message(const ipc::Peer& peer, ipc::Envelope envelope) override;
  void on_peer_silent(const ipc::Peer& peer) override;
  void on_peer_died(const ipc::Peer& peer) override;

 private:
  struct Request {
    ipc::IncarnationId peer;
    ipc::Envelope envelope;  ///< Without its body.
    std::variant<ipc::Step, ipc::Decode> work;
    [[nodiscard]] ipc::SessionId session() const;
    [[nodiscard]] ipc::Epoch epoch() const;
  };
  struct GroupResult {
    std::unique_ptr<ipc::PinnedBuffer> sums;
    std::size_t sum_count = 0;
    std::unique_ptr<ipc::PinnedBuffer> mismatches;
    std::vector<std::uint32_t> places;
  };
  struct InFlight {
    ipc::IncarnationId peer;
    ipc::Envelope envelope;
    ArenaUse use;
    ScratchBuffer workspace;
    std::vector<GroupResult> results;
    std::size_t verify_count = 0;
    std::optional<DecodeWork> decode;
    std::optional<std::uint32_t> in_graph;  ///< Sequences of a pass that the graph computes.
    std::vector<std::unique_ptr<ipc::RegionTable>> layer_tables;
    std::unique_ptr<ipc::RecordedWork> recorded;
    std::vector<ipc::LayerTicket> tickets;     ///< Of uses that it has begun.
    std::optional<ipc::LayerTicket> computes;  ///< The one of them that a store waits for.
    std::optional<ipc::Error> error;
  };

  template <typename Work> void enqueue(const ipc::Peer& peer, ipc::Envelope envelope);
  void on_memory(const ipc::Peer& peer, const ipc::Envelope& envelope);
  void drop_queued(const ipc::IncarnationId& peer);
  void start_queued();
  void start(Request request);
  [[nodiscard]] ipc::Status launch(const ipc::Step& step, InFlight& work);
  [[nodiscard]] ipc::Status launch(const ipc::Decode& pass, InFlight& work);
  [[nodiscard]] ipc::Status launch_group(const GroupStep& step,
                                         std::uint32_t decode_steps,
                                         const GroupView& view,
                                         GroupResult& result);
  [[nodiscard]] ipc::Status launch_layers(const ipc::Step& step,
                                          const std::vector<GroupStep>& groups,
                                          InFlight& work);
  [[nodiscard]] ipc::Status enqueue_layers(const ipc::Step& step,
                                           const std::vector<GroupStep>& groups,
                                           InFlight& work,
                                           ipc::Stream& stream);
  [[nodiscard]] ipc::Status prepare_workspace(const ipc::Step& step, InFlight& work);
  [[nodiscard]] ipc::StepReply take_results(InFlight& work);
  [[nodiscard]] std::optional<ipc::DecodeReply> take_outputs_of(InFlight& work);
  void finish(std::list<InFlight>::iterator work, const ipc::Status& status);
  void fail(const ipc::IncarnationId& peer, const ipc::Envelope& envelope, ipc::Error error);
  void empty_after_failure(ipc::Error& error);
  void empty_when_idle();

  ipc::Device& device_;
  const Enter enter_;
  CachingAllocator& allocator_;
  ModelTables& tables_;
  LayerWords& layers_;
  ipc::ComputeActivity& activity_;
  const ipc::Rank rank_;
  const std::uint32_t tokens_per_block_;
  PinnedPool pinned_;              ///< Outlives the work that writes its buffers.
  std::list<InFlight> in_flight_;  ///< Holds such buffers, too.
  DecodeGraph graph_;              ///< And so does it.
  std::vector<std::function<void()>> graph_waiters_;
  StreamCompletions completions_;
  std::deque<Request> queue_;
  ipc::MemoryTags released_;  ///< While there are any, steps are refused.
  FailureRule failure_rule_;
  IdleTrim idle_trim_;
  std::unique_ptr<ipc::ControlServer> server_;
};

}  // namespace kvferry::worker
