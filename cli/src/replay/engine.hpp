// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/device_index.hpp"
#include "kvferry/worker/load_pins.hpp"
#include "kvferry/worker/load_plan.hpp"
#include "kvferry/worker/offer_pace.hpp"
#include "kvferry/worker/prefix_plan.hpp"
#include "kvferry/worker/prefix_units.hpp"
#include "kvferry/worker/step_channel.hpp"
#include "kvferry/worker/storing_keys.hpp"
#include "kvferry/worker/tier_options.hpp"
#include "kvferry/worker/write_back.hpp"
#include "replay/counters.hpp"
#include "replay/offload_watch.hpp"
#include "replay/trace.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvferry::cli {

using worker::BlockSource;
using worker::GroupIndex;
using worker::PrefixPlan;
using worker::StepChannel;

/// Which blocks are held to the pattern that they were filled with when they are used again.
enum class VerifyPolicy : std::uint8_t { kOff, kSample, kFull };

struct EngineOptions {
  std::string runtime_dir;
  std::string instance;
  std::string engine = "replay";
  ipc::Geometry geometry;
  ipc::ArenaOrder order = ipc::ArenaOrder::kLayerFirst;
  ipc::CacheOwner cache_owner = ipc::CacheOwner::kWorker;
  std::uint32_t in_flight = 16;    ///< Requests worked on at a time.
  std::uint32_t decode_steps = 1;  ///< Reads of a request's blocks.
  double speed = 0;                ///< Times the trace's own pace; 0: as fast as it goes.
  VerifyPolicy verify = VerifyPolicy::kSample;
  ipc::Duration start_limit{};  ///< From start() until all processes work together.
  ipc::Duration patience{};     ///< When nothing goes on, or offload is away with nobody dead.
  worker::TierOptions tier;
};

/// A small serving engine: takes requests in their order, keeps its own index of device blocks,
/// loads what the host tier has, lets the workers compute the rest, and stores every new block.
/// Whatever dies, a request is put back and served again. It obeys pauses and flushes.
/// @threading the loop's thread.
class Engine final : private worker::SchedulerControl {
 public:
  struct Hooks {
    std::function<void(const std::string& line)> say;
    std::function<void(std::uint64_t finished)> on_request_done;
    /// Every process is there for the first time: requests are taken from now on.
    std::function<void()> on_started;
    /// Deaths of processes of the run, so far.
    std::function<std::uint64_t()> deaths;
    /// Everything is served and nothing is in flight, or it cannot go on.
    std::function<void(const ipc::Status&)> on_end;
  };

  /// requests outlive the engine.
  Engine(ipc::EventLoop& loop,
         EngineOptions options,
         std::span<const TraceRequest> requests,
         ReplayCounters& counters,
         Hooks hooks);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine() override;

  /// Starts to connect; everything else follows from the loop.
  void start();
  /// The cache is usable: blocks can be handed out and computed on.
  [[nodiscard]] bool is_ready() const;
  /// A manager is there and does not stand still: what it is asked, it answers soon.
  [[nodiscard]] bool manager_serves();
  /// What it is doing, in words: for messages about a stall.
  [[nodiscard]] std::string describe() const;

 private:
  /// A block of one attempt. Lives in one era of the device index.
  struct HeldBlock {
    ipc::GroupId group;
    ipc::BlockId block;
    std::uint32_t position = 0;
    ipc::Digest hash;
    ipc::Digest before{};  ///< Hash of the block that it continues.
    BlockSource source = BlockSource::kNowhere;
    worker::UnitPart place;   ///< In host memory, where it comes from there.
    bool announced = false;   ///< In the index under its hash, by us.
    bool survived = false;    ///< On the device since before the death of a worker.
    bool prefetched = false;  ///< Loaded before its request was let in.
  };
  /// What is done for a request of the queue before it is let in.
  struct Prefetched {
    worker::Prefetcher::Id id = 0;  ///< 0: nothing is loaded.
    /// Found on the device and held, loaded, or (kHost) still to come.
    std::vector<HeldBlock> blocks;
    std::vector<worker::PinnedBlock> pinned;  ///< In host memory: to be loaded, now or later.
    bool stopped = false;
    bool incomplete = false;  ///< Stopped before all had come: the rest is computed.
    bool waited = false;
  };
  /// One try to serve a request. It holds its blocks until no load and no step touches them.
  struct Attempt {
    std::size_t request = 0;
    std::uint64_t era = 0;
    std::vector<HeldBlock> blocks;
    std::vector<HeldBlock> outputs;
    std::vector<bool> hit_from_host;  ///< Per block of the hit prefix.
    std::uint32_t hit_blocks = 0;
    std::vector<worker::PinnedBlock> pinned;  ///< In host memory, until they are loaded.
    std::vector<std::size_t> loading;         ///< Indexes into blocks.
    std::vector<std::size_t> verifying;       ///< Indexes into blocks.
    std::vector<std::uint64_t> mismatches;    ///< Words per verified block, over all ranks.
    std::uint32_t ranks_outstanding = 0;
    std::uint32_t load_retries = 0;
    bool doomed = false;  ///< Its request was put back or aborted; only ends what runs.
    bool frozen = false;  ///< Ready for its step, stopped by a pause; nothing of it is in flight.
    std::optional<ipc::Error> error;
    ipc::TimePoint begun_at{};          ///< Its load or step that runs was submitted.
    std::uint64_t loading_bytes = 0;    ///< Of the load that runs.
    std::uint64_t computed_blocks = 0;  ///< Of the step that runs.
  };
  /// Blocks that are stored as one.
  struct StoredUnit {
    worker::StoreTarget target;
    std::vector<HeldBlock> blocks;  ///< The hash of the last one is the unit's key.
  };
  struct StoreJob {
    std::uint64_t era = 0;
    std::vector<StoredUnit> units;
    bool evicting = false;  ///< The blocks are written back, to be evicted next.
  };
  enum class Admission : std::uint8_t { kAdmitted, kConflict, kNoRoom, kTooLong, kNotDue };
  using AttemptId = std::uint64_t;

  // engine.cpp: connection, state of the cache, the end.
  void connect();
  void on_client();
  void look_at_state();
  /// The first request waits until all of them can be served as meant, offload included.
  [[nodiscard]] bool start_playing();
  void begin_generation(const worker::CacheState& state);
  void forget_contents();
  void lose_device_contents();
  void on_worker_lost(ipc::Rank rank);
  void watch_progress();
  void watch_offload();
  [[nodiscard]] std::string offload_reasons() const;
  void pump();
  void pump_later();
  void end_when_done();
  void fail(ipc::Error error);
  [[nodiscard]] bool offload_usable() const;

  // engine_hold.cpp: pauses and flushes.
  void hold(worker::PauseMode mode) override;
  void resume() override;
  [[nodiscard]] worker::ScheduledWork count() const override;
  void reset_cache() override;
  void stop_for(worker::PauseMode mode, Attempt& attempt);
  void abort(std::size_t request);
  /// An attempt is ready for its step, which a pause does not let start: it is frozen or ended.
  [[nodiscard]] bool holds_back(AttemptId id, Attempt& attempt);

  // engine_admit.cpp: from the queue to a load or a step.
  [[nodiscard]] const std::vector<ipc::Digest>& hashes_of(std::size_t request);
  /// When it arrives. @pre check_pace() of its trace and speed.
  [[nodiscard]] ipc::TimePoint due_at(std::size_t request) const;
  [[nodiscard]] Admission try_admit(std::size_t request);
  [[nodiscard]] bool has_pending_block(const std::vector<ipc::Digest>& hashes) const;
  [[nodiscard]] bool may_fit(std::size_t request, const std::vector<ipc::Digest>& hashes) const;
  void ask_whether_manager_serves(const std::vector<ipc::Digest>& hashes);
  [[nodiscard]] PrefixPlan make_plan(const TraceRequest& request,
                                     const std::vector<ipc::Digest>& hashes,
                                     bool may_load);
  /// A plan for which there is room, and of which nothing goes before it is loaded.
  [[nodiscard]] std::optional<PrefixPlan> plan_to_admit(std::size_t request,
                                                        bool may_load,
                                                        std::vector<worker::PinnedBlock>& pinned);
  [[nodiscard]] bool fits(const PrefixPlan& plan,
                          const std::vector<ipc::Digest>& hashes,
                          std::uint32_t output_blocks) const;
  void take_blocks(Attempt& attempt,
                   const PrefixPlan& plan,
                   const std::vector<ipc::Digest>& hashes,
                   std::uint32_t output_blocks);
  /// Where the latest plan loads it from. @pre it does
  void set_place(HeldBlock& held);
  /// So that host memory keeps the first blocks of the prefix.
  void tell_use(std::uint32_t blocks);
  /// kStaleEpoch: the device's blocks may be other memory's than the load was planned for.
  [[nodiscard]] ipc::Result<ipc::JobId> send_load(std::span<const worker::LoadItem> items,
                                                  std::uint8_t priority,
                                                  std::optional<ipc::TimePoint> due);
  void submit_load(AttemptId id, Attempt& attempt);
  /// What became of a load says what the unit has.
  void note_loaded(ipc::GroupId group, const worker::UnitPart& place);
  void note_not_loaded(ipc::GroupId group, const worker::UnitPart& place, std::uint8_t result);
  void on_load_done(AttemptId id, const worker::Completion& completion);

  // engine_step.cpp: compute, verify, store, let go.
  void start_step(AttemptId id, Attempt& attempt);
  void on_step_done(AttemptId id, ipc::Result<ipc::StepReply> reply);
  void finish_step(AttemptId id);
  void finish_request(Attempt& attempt);
  void check_verified(Attempt& attempt);
  void count_hits(const Attempt& attempt);
  void release(const Attempt& attempt);
  void put_back(Attempt& attempt);
  void end_attempt(AttemptId id);
  [[nodiscard]] bool wants_verify();

  // engine_write.cpp: to host memory, by the write policy.
  void store_blocks(const Attempt& attempt);
  /// What the write policy wants stored of it now.
  [[nodiscard]] std::vector<StoredUnit> units_wanted(const Attempt& attempt);
  /// What is not there is offered, as far as the manager takes it.
  void store(std::vector<StoredUnit> units, bool evicting);
  /// False when nothing was sent.
  bool offer(std::vector<StoredUnit> units, bool evicting);
  void on_store_done(StoreJob job, const worker::Completion& completion);
  /// It does not stand still; looks again when that may be known.
  [[nodiscard]] bool manager_answers();
  /// Host memory has all of the unit.
  void note_stored(const StoredUnit& unit);
  void write_back(const std::vector<worker::EvictedBlock>& blocks);
  /// What the plan takes from free and kept blocks may be taken now: nothing that the write policy
  /// keeps is lost by that, or it cannot be helped.
  [[nodiscard]] bool make_room(std::size_t request,
                               const PrefixPlan& plan,
                               const std::vector<ipc::Digest>& hashes,
                               std::uint32_t output_blocks);
  [[nodiscard]] bool room_is_made(const std::vector<std::uint64_t>& needed);
  /// Stores what is to be evicted soon, so that a request need not wait for it.
  void write_back_ahead();
  void note_counts();

  // engine_prefetch.cpp: for requests that wait.
  void make_prefetcher();
  /// device_full: host memory keeps blocks for them, nothing is loaded.
  void prefetch_waiting(bool device_full);
  void prefetch(std::size_t request, bool device_full);
  [[nodiscard]] bool evicts_unstored(const PrefixPlan& plan) const;
  [[nodiscard]] bool prefetch_fits(const PrefixPlan& plan,
                                   const std::vector<ipc::Digest>& hashes) const;
  [[nodiscard]] std::vector<HeldBlock> hold_ahead(const PrefixPlan& plan,
                                                  const std::vector<ipc::Digest>& hashes);
  void load_ahead(std::size_t request,
                  const PrefixPlan& plan,
                  const std::vector<ipc::Digest>& hashes);
  /// It is the request's turn: whether it starts now, with what has come.
  [[nodiscard]] bool prefetch_lets_start(std::size_t request);
  /// The queue is looked at then, if not earlier.
  void look_again_at(ipc::TimePoint when);
  void stop_prefetch(Prefetched& prefetched);
  void on_landing(const worker::Prefetcher::Landing& landing);
  /// Nothing of it is needed in host memory any more, once all has come.
  void unpin_landed(Prefetched& prefetched);
  /// The attempt, if any, holds what it needs of it by now.
  void end_prefetch(std::size_t request, Attempt* attempt);
  void end_prefetches();

  // engine_pins.cpp: what is found in host memory stays there until it is loaded.
  void on_pins_failed(const ipc::Error& error);
  /// False: something of it has gone since the plan was made, or was never there, or nobody
  /// answers. Nothing is pinned then.
  [[nodiscard]] bool pin_loads(const PrefixPlan& plan,
                               std::vector<worker::PinnedBlock>& pinned,
                               worker::LoadPins::Parts parts = worker::LoadPins::Parts::kAsPlanned);
  void lease(std::size_t request, const PrefixPlan& plan);

  [[nodiscard]] GroupIndex& index_of(ipc::GroupId group) { return index_[group.value]; }
  [[nodiscard]] const GroupIndex& index_of(ipc::GroupId group) const { return index_[group.value]; }

  ipc::EventLoop& loop_;
  const EngineOptions options_;
  const worker::StoreUnits units_;
  worker::LackingParts lacking_;
  const std::span<const TraceRequest> requests_;
  ReplayCounters& counters_;
  Hooks hooks_;

  std::unique_ptr<worker::Client> client_;
  std::vector<std::unique_ptr<StepChannel>> channels_;

  /// The arena that blocks are handed out of. An era ends when block ids may mean other memory.
  std::uint64_t era_ = 0;
  std::vector<GroupIndex> index_;
  std::vector<worker::ArenaId> arenas_;
  std::uint64_t generation_ = 0;
  ipc::Digest weights_;  ///< That the workers compute with.
  std::uint64_t reconnects_ = 0;
  std::uint64_t contents_ = 0;  ///< CacheState::contents that was acted on.
  std::uint64_t worker_deaths_ = 0;
  std::optional<worker::PauseMode> held_;  ///< No request gets blocks and no step starts.
  bool phase_ready_ = false;
  bool playing_ = false;  ///< Was ready for everything once.

  std::set<std::size_t> waiting_;  ///< Requests to serve, in their order.
  std::set<std::size_t> begun_;    ///< Of those, the ones that were put back.
  std::unordered_map<std::size_t, std::vector<ipc::Digest>> hashes_;
  std::unordered_map<std::size_t, std::uint32_t> failures_;
  std::unordered_map<AttemptId, Attempt> attempts_;
  std::unordered_map<ipc::JobId, AttemptId> load_jobs_;
  worker::OfferPace pace_;
  std::unordered_map<ipc::JobId, StoreJob> store_jobs_;
  AttemptId next_attempt_ = 1;
  std::uint64_t verify_turn_ = 0;
  worker::WritePolicy write_policy_;
  worker::StoreGate gate_;
  worker::LoadChoice choice_;
  std::vector<std::uint64_t> writing_back_;  ///< Blocks of each group.
  std::uint64_t loading_bytes_ = 0;          ///< Of all loads that run.
  std::optional<worker::Prefetcher> prefetcher_;
  std::unordered_map<std::size_t, Prefetched> prefetched_;               ///< By request.
  std::unordered_map<worker::Prefetcher::Id, std::size_t> prefetching_;  ///< Not stopped ones.
  worker::Prefetcher::Id next_prefetch_ = 1;
  worker::Prefetcher::Id first_of_era_ = 1;  ///< Blocks of earlier ones are of other memory.
  worker::LoadPins pins_;
  ipc::TimerId prefetch_timer_ = 0;
  std::optional<ipc::TimePoint> look_again_;   ///< When prefetch_timer_ is due.
  worker::LoadChoice::Decision decision_;      ///< Of the latest plan.
  std::optional<worker::PrefixUnits> places_;  ///< Of the latest plan's request.
  worker::StoringKeys storing_;
  std::optional<ipc::TimePoint> room_wanted_since_;
  std::size_t room_wanted_for_ = 0;  ///< A request.
  ipc::TimerId room_timer_ = 0;
  ipc::TimerId answer_timer_ = 0;

  OffloadWatch offload_watch_;
  bool pump_posted_ = false;
  bool ended_ = false;
  ipc::TimePoint started_at_{};   ///< The first request may go.
  ipc::TimePoint not_before_{};   ///< After a refused step: when to try again.
  ipc::TimePoint progress_at_{};  ///< Something last went on.
  ipc::TimePoint not_ready_since_{};
  ipc::TimerId connect_timer_ = 0;
  ipc::TimerId watch_timer_ = 0;
  ipc::TimerId due_timer_ = 0;
  ipc::TimePoint manager_asked_{};  ///< Whether it serves, the last time.
  bool manager_serves_ = true;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  ///< For posted calls.
};

/// What a block is filled with, on every rank: by its hash and group.
[[nodiscard]] std::uint64_t seed_of(const ipc::Digest& hash, ipc::GroupId group) noexcept;

}  // namespace kvferry::cli
