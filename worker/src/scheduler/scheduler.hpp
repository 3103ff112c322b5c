// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/rank/rank_config.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/load_choice.hpp"
#include "kvferry/worker/load_pins.hpp"
#include "kvferry/worker/offer_pace.hpp"
#include "kvferry/worker/prefetcher.hpp"
#include "kvferry/worker/step_channel.hpp"
#include "kvferry/worker/store_gate.hpp"
#include "kvferry/worker/storing_keys.hpp"
#include "kvferry/worker/tier_options.hpp"
#include "kvferry/worker/write_policy.hpp"
#include "scheduler/batch_plan.hpp"
#include "scheduler/paged_cache.hpp"
#include "scheduler/sequence.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvferry::worker {

/// The scheduler of an engine of reference workers, in the process of rank 0: a waiting queue, a
/// running batch and block tables. Takes requests on the generation channel, has the runners of all
/// ranks compute one pass at a time for the whole batch, keeps prefixes on the device and in host
/// memory, and obeys pauses and flushes like any engine's scheduler. When a manager, a mover or
/// another rank's worker dies, a request is put back and served again. Those of a pass that fails
/// for another reason end with its error.
/// @threading the loop's thread.
class Scheduler final : public ipc::ControlHandler, private SchedulerControl {
 public:
  static constexpr std::size_t kMaxSequences = 4096;
  /// Of all requests together, prompts and what they ask for: bounds what their tokens take.
  static constexpr std::uint64_t kMaxTokensOwed = std::uint64_t{16} << 20;

  /// weights: whether the workers name theirs. Throws Exception: the names are taken.
  Scheduler(ipc::EventLoop& loop,
            ipc::RuntimeDir dir,
            ipc::RankConfig config,
            bool weights,
            const TierOptions& tier);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;
  ~Scheduler() override;

  void on_peer(const ipc::Peer& peer) override;
  void on_message(const ipc::Peer& peer, ipc::Envelope envelope) override;
  void on_peer_silent(const ipc::Peer& peer) override;
  void on_peer_died(const ipc::Peer& peer) override;

 private:
  using Number = std::uint64_t;
  struct Pass {
    std::vector<Number> batch;
    std::vector<std::uint64_t> outputs;  ///< Of each of the batch, summed over ranks.
    std::uint32_t ranks_outstanding = 0;
    std::optional<ipc::Error> error;
    ipc::TimePoint begun{};
    std::uint64_t tokens = 0;  ///< Whose keys and values it writes.
  };
  struct LoadJob {
    Number number = 0;
    std::vector<LoadItem> items;
    std::vector<PinnedBlock> pinned;  ///< In host memory, until they are loaded.
    ipc::TimePoint submitted{};
    std::uint64_t bytes = 0;  ///< Over the links of all ranks.
  };
  struct StoreJob {
    std::uint64_t era = 0;
    std::vector<PagedCache::Unstored> units;
    bool evicting = false;  ///< They are written back, to be evicted next.
  };

  // scheduler.cpp: connection, the state of the cache, requests.
  void connect();
  void on_client();
  void look_at_state();
  void begin_generation(const CacheState& state);
  void forget_contents();
  void lose_device_contents();
  void on_worker_lost(ipc::Rank rank);
  void on_generate(const ipc::Peer& peer, ipc::Envelope envelope);
  void drop_requests(const ipc::IncarnationId& peer);
  [[nodiscard]] bool is_ready() const;
  [[nodiscard]] bool offload_usable() const;
  void pump();
  void pump_later();

  // scheduler_hold.cpp: pauses and flushes.
  void hold(PauseMode mode) override;
  void resume() override;
  [[nodiscard]] ScheduledWork count() const override;
  void reset_cache() override;
  /// Nothing of it is in flight: it becomes what its fate, or the pause in force, says.
  void settle(Number number);
  void retract(Sequence& sequence);

  // scheduler_admit.cpp: from the queue into the batch, and host memory.
  void admit_waiting();
  [[nodiscard]] bool try_admit(Sequence& sequence);
  /// One has no room. If it is the first of the queue and nothing else makes some, prefetches end.
  void prefer_first(bool is_first);
  void ask_whether_manager_serves(const Sequence& sequence);
  void tell_use(const Sequence& sequence);
  /// Where the latest plan loads a block from. @pre it does
  [[nodiscard]] UnitPart place_of(ipc::GroupId group, std::uint32_t position);
  /// kStaleEpoch: the device's blocks may be other memory's than the load was planned for.
  [[nodiscard]] ipc::Result<ipc::JobId> send_load(std::span<const LoadItem> items,
                                                  std::uint8_t priority,
                                                  std::optional<ipc::TimePoint> due);
  void submit_loads(Number number, std::vector<LoadItem> items, std::vector<PinnedBlock> pinned);
  void load_again(LoadJob job);
  void on_load_done(LoadJob job, const Completion& completion);
  void keep_what_came(Sequence& sequence, const LoadJob& job, const Completion& completion);
  void note_lacking(ipc::GroupId group, const UnitPart& place, std::uint8_t result);
  /// The manager does not answer in time: computing goes on without it for a while.
  void do_without_offload();
  /// Where its blocks come from, as far as that is worth it. looks: in host memory, too.
  [[nodiscard]] PrefixPlan plan_for(const Sequence& sequence, bool looks);
  /// A plan for which there is room, and of which nothing goes before it is loaded. looks: in host
  /// memory, too; whether it did in the end.
  [[nodiscard]] std::optional<PrefixPlan> plan_to_admit(const Sequence& sequence,
                                                        bool& looks,
                                                        std::vector<PinnedBlock>& pinned);
  /// False: something of it has gone since the plan was made, or was never there, or nobody
  /// answers.
  [[nodiscard]] bool pin_loads(const PrefixPlan& plan,
                               std::vector<PinnedBlock>& pinned,
                               LoadPins::Parts parts = LoadPins::Parts::kAsPlanned);

  // scheduler_store.cpp: to host memory, by the write policy.
  void store_new_blocks(Sequence& sequence);
  void store(std::vector<PagedCache::Unstored> units, bool evicting);
  /// False when nothing was sent.
  bool offer(std::vector<PagedCache::Unstored> units, bool evicting);
  /// Host memory has all of it.
  void note_there(const PagedCache::Unstored& unit);
  void on_store_done(const StoreJob& job, const Completion& completion);
  /// Not one that stands still: what it was given would be waited for in vain. Looks again when
  /// that may be known.
  [[nodiscard]] bool manager_answers();
  [[nodiscard]] bool is_writing_back() const;
  void write_back(const std::vector<EvictedBlock>& blocks);
  /// Whether the sequence may take its blocks: nothing is lost by that, or it cannot be helped.
  [[nodiscard]] bool make_room(const Sequence& sequence, const PrefixPlan& wanted);
  void write_back_ahead();

  // scheduler_prefetch.cpp: for requests that wait.
  struct Prefetched {
    Prefetcher::Id id = 0;
    std::vector<PagedCache::Ahead> blocks;
    std::vector<PinnedBlock> pinned;  ///< In host memory, until all of it has come.
    bool stopped = false;
    bool incomplete = false;  ///< Stopped before all had come: the rest is computed.
  };
  void prefetch_waiting();
  void make_prefetcher();
  /// The first block that the plan loads already comes for another request.
  [[nodiscard]] bool comes_already(const Sequence& sequence, const PrefixPlan& wanted) const;
  /// The queue is looked at then, if not earlier.
  void look_again_at(ipc::TimePoint when);
  [[nodiscard]] bool prefetch(Sequence& sequence);
  /// It is the request's turn: whether it starts now, with what has come.
  [[nodiscard]] bool prefetch_lets_start(Number number);
  void stop_prefetch(Prefetched& prefetched);
  void on_landing(const Prefetcher::Landing& landing);
  /// Nothing of it is needed in host memory any more, once all has come.
  void unpin_landed(Prefetched& prefetched);
  void end_prefetch(Number number);
  void end_prefetches();

  // scheduler_pass.cpp: the batch.
  void start_pass();
  [[nodiscard]] bool make_room_for(Sequence& sequence);
  void on_rank_done(ipc::Result<ipc::DecodeReply> reply);
  void finish_pass();
  void advance(Sequence& sequence, std::uint64_t output);
  void answer(const Sequence& sequence, ipc::GenerateEnd how);
  void refuse(const Asker& asker, ipc::Error error);
  /// @pre answered, nothing of it in flight
  void end(Number number);

  ipc::EventLoop& loop_;
  const ipc::RuntimeDir dir_;
  const ipc::RankConfig config_;
  const bool weights_named_;
  std::unique_ptr<ipc::ControlServer> server_;
  std::unique_ptr<Client> client_;
  std::vector<std::unique_ptr<StepChannel>> channels_;

  const TierOptions tier_;
  WritePolicy write_policy_;
  StoreGate gate_;
  LoadChoice choice_;
  LoadChoice::Decision decision_;      ///< Of the latest plan.
  std::optional<PrefixUnits> places_;  ///< Of the latest plan, until its sequence grows.
  LoadPins pins_;
  std::vector<std::uint64_t> writing_back_;  ///< Blocks of each group.
  std::uint64_t loading_bytes_ = 0;
  StoringKeys storing_;
  std::optional<ipc::TimePoint> room_wanted_since_;
  Number room_wanted_for_ = 0;
  ipc::TimerId room_timer_ = 0;
  ipc::TimerId answer_timer_ = 0;
  std::optional<Prefetcher> prefetcher_;
  std::map<Number, Prefetched> prefetched_;
  std::unordered_map<Prefetcher::Id, Number> prefetching_;  ///< Not stopped ones.
  std::optional<ipc::TimePoint> look_again_;                ///< When prefetch_timer_ is due.
  ipc::TimerId prefetch_timer_ = 0;
  bool first_alone_ = false;  ///< Nothing is prefetched before the next request is let in.
  Prefetcher::Id next_prefetch_ = 1;
  Prefetcher::Id first_of_era_ = 1;  ///< Blocks of earlier ones are of other memory.

  PagedCache cache_;
  LackingParts lacking_;
  /// The arena that blocks are handed out of. An era ends when block ids may mean other memory.
  std::uint64_t era_ = 0;
  std::vector<ArenaId> arenas_;
  /// Of each rank, the worker that died last: nothing is computed before the manager names another
  /// one, whose memory and weights are known then.
  std::vector<ipc::IncarnationId> dead_workers_;
  std::uint64_t generation_ = 0;
  std::uint64_t reconnects_ = 0;
  std::uint64_t contents_ = 0;  ///< CacheState::contents that was acted on.
  ipc::Digest weights_;
  bool phase_ready_ = false;
  std::optional<PauseMode> held_;

  std::map<Number, Sequence> sequences_;
  std::set<Number> waiting_;
  std::set<Number> admitted_;  ///< With blocks; a sequence is in one of the two.
  Number next_number_ = 1;
  std::uint64_t tokens_owed_ = 0;
  std::optional<Pass> pass_;
  std::unordered_map<ipc::JobId, LoadJob> load_jobs_;
  OfferPace pace_;
  std::unordered_map<ipc::JobId, StoreJob> store_jobs_;

  std::string connect_trouble_;  ///< Said already.
  bool pump_posted_ = false;
  ipc::TimePoint not_before_{};  ///< After a refused pass: when to try again.
  ipc::TimePoint no_offload_before_{};
  ipc::TimePoint manager_asked_{};  ///< Whether it serves, the last time.
  ipc::TimerId connect_timer_ = 0;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< For posted calls.
};

}  // namespace kvferry::worker
