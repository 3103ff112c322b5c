// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/index/prefix_rules.hpp"
#include "kvferry/ipc/model/block_key.hpp"
#include "kvferry/ipc/model/layer_ticket.hpp"
#include "kvferry/ipc/model/retention.hpp"
#include "kvferry/ipc/model/urgency.hpp"
#include "kvferry/ipc/os/home_process.hpp"
#include "kvferry/ipc/rank/component_user.hpp"
#include "kvferry/ipc/rank/memory_user.hpp"
#include "kvferry/worker/pinned_block.hpp"
#include "kvferry/worker/scheduler_control.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

/// The engine's interface to kvferry: batched, every call takes a deadline or does not block, none
/// throws. docs/example_engine.cpp is a complete small engine.
namespace kvferry::worker {

using ipc::BlockId;
using ipc::Deadline;
using ipc::Digest;
using ipc::ErrorCode;
using ipc::GroupId;
using ipc::JobId;
using ipc::PrefixMatch;
using ipc::Result;
using ipc::Status;

struct ClientOptions {
  std::string runtime_dir;  ///< Empty: the default (RuntimeDir).
  std::string instance = "default";
  std::string engine = "default";  ///< The engine that the workers registered as.
  std::uint32_t ranks = 1;
  ipc::ModelIdentity identity;  ///< Blocks are shared only within one identity.
  /// Keep every change of the state for events(), which then has to be called: fd() stays readable
  /// until it was.
  bool events = false;
  /// Obeys pauses and flushes; without one they are refused for this engine while the client is
  /// connected. Outlives the client.
  SchedulerControl* scheduler = nullptr;
  /// How long wait() looks for completions before it sleeps on them: an urgent block is seen some
  /// 10 us sooner, for a processor meanwhile.
  std::chrono::microseconds awake{0};
};

enum class Presence : std::uint8_t { kMiss = 1, kHitPending, kHit };

struct LookupResult {
  /// Blocks from the first on that can be loaded, by the rules of all groups.
  std::uint32_t usable_prefix = 0;
  /// presence[group][i] for hashes[i]. kHitPending: being stored; ask again or wait.
  std::vector<std::vector<Presence>> presence;
};

enum class Reservation : std::uint8_t { kReserved = 1, kAlreadyThere, kFull, kInUse };

struct StoreTarget {
  GroupId group;
  Digest block;  ///< Not zero. Or what names the store unit.
  /// The block of the prefix right before it, zero at its beginning: so that what continues a block
  /// is evicted before it. Zero where that is not known costs hits, never correctness.
  Digest before{};
  /// Of a block that is there already the stronger one holds: the higher priority, or of equal ones
  /// the later end. What a block continues stays as long as the block does. Forgotten when the
  /// manager is replaced.
  std::optional<ipc::Retention> retention{};
  /// Of a store unit, the parts that will be stored, a bit for each: a unit that is there without
  /// some of them gives way to this one; kInUse while it is pinned, or other blocks that are being
  /// stored continue it. 0: whatever is there suffices.
  std::uint64_t parts = 0;
};
struct StoreSlot {
  Reservation outcome = Reservation::kFull;
  std::uint64_t slot = 0;  ///< Valid with kReserved: ends with a submit or abandon.
};
struct StoreItem {
  GroupId group;
  BlockId block;  ///< Source on every rank.
  std::uint64_t slot = 0;
  std::uint32_t part = 0;  ///< Which block of the store unit it is.
};
struct LoadItem {
  GroupId group;
  BlockId block;           ///< Target on every rank; unusable until the job is done.
  Digest key;              ///< Chained block hash, or that of the store unit,
  std::uint32_t part = 0;  ///< of which it is this block.
};
struct SequenceItem {
  GroupId group;
  BlockId block;
  std::uint32_t index = 0;  ///< Place of the block in its sequence.
};

/// One finished job. results[i] is empty-handed (0) or an ErrorCode for item i, over all ranks:
/// kTimeout for a job that could not be started in time, or that a mover gave up because it got no
/// further.
/// When this arrives no copier of ours touches the job's blocks any more, whatever has died.
struct Completion {
  JobId job;
  std::vector<std::uint8_t> results;
  std::string message;      ///< Text of the first error.
  std::uint64_t bytes = 0;  ///< Moved over the link, all ranks.
  [[nodiscard]] bool all_ok() const noexcept {
    for (const std::uint8_t result : results) {
      if (result != 0) return false;
    }
    return true;
  }
};

enum class CachePhase : std::uint8_t { kDetached = 1, kReady, kClearing, kCleared };

/// The device blocks of one rank. Equal session, epoch and prepared_by: the same memory with the
/// same contents.
struct ArenaId {
  ipc::SessionId session;
  ipc::Epoch epoch;
  /// Names the zeroing that the contents go back to, where the memory outlives its workers.
  ipc::LeaseId prepared_by{};
  /// The life of the worker that computes on them.
  ipc::IncarnationId worker{};
};
[[nodiscard]] constexpr bool same_contents(const ArenaId& a, const ArenaId& b) noexcept {
  return a.session == b.session && a.epoch == b.epoch && a.prepared_by == b.prepared_by;
}

/// The cache as the manager sees it. When `contents` has grown, device blocks hold nothing: drop
/// the device index and retract running requests. Another `generation` alone is no reason: each
/// manager counts anew, of blocks that hold what they held.
///
/// So over the death of a manager, while contents stays, the device index and running requests
/// stay, and computing goes on. Jobs that it had end with kPeerDied, once no mover works for it:
/// whether they were done is not known. Jobs that the next one gets under the earlier generation
/// end with kStaleEpoch. Submit both again. Reservations and pins are over. Of host memory the next
/// manager serves what had its checksums by then, sequences included, if a mover kept the pool:
/// look there again before relying on it, or store again what the device still has.
///
/// Where the movers own the memory (`--cache-owner mover`) a worker may be replaced while the
/// contents stay: only ArenaId::worker of its rank changes, and every block keeps what it held.
/// What the earlier worker had been told to compute and has not answered may be written in part, on
/// that rank: forget those blocks, on every rank, and run the step again. They may be written anew
/// at once: a next worker is let in only after the earlier one was proven dead or had let go. Jobs
/// that its death met end with an error per block as always (kPeerDied, kRevoked or kNotReady);
/// targets of such loads hold nothing.
struct CacheState {
  std::uint64_t generation = 0;  ///< That submits name; of this manager.
  CachePhase phase = CachePhase::kDetached;
  bool offload_ready = false;  ///< Jobs are accepted.
  std::vector<ArenaId> ranks;
  std::vector<std::uint32_t> group_blocks;
  /// Identity of the weights that the workers compute with; zero when they name none. When it
  /// changes, forget what every block holds: nothing of before is found under it, in any tier,
  /// until it comes back. Requests that were paused in place may go on with the blocks they have;
  /// nothing of such a request is stored or found by others any more.
  Digest weights;
  bool manager_connected = false;
  /// Set when workers registered, after this client connected, with another fingerprint or rank
  /// count (kGeometryMismatch): connect anew with theirs. Every call is refused for it meanwhile.
  std::optional<ipc::Error> refused;
  /// Counted by this client, over all managers: grows when the blocks of some rank are known to be
  /// others than they were, or gone (a clear, a re-init, the death of who owned the memory), and at
  /// nothing else. 0: the cache was never ready. While phase is not kReady nothing more may be
  /// known than before, as at a manager that has just come.
  std::uint64_t contents = 0;
};

/// One change of CacheState. state() shows what is; events tell what was in between, such as a
/// clear and a re-init between two polls.
enum class CacheEventKind : std::uint8_t {
  kManagerLost = 1,  ///< Running jobs complete with kPeerDied, later; computing may go on.
  kManagerFound,     ///< Connected again, to the same manager or its successor.
  kGeneration,       ///< It is another; see kContents.
  kPhase,
  kOffload,  ///< Jobs are accepted from now on, or no longer.
  kRefused,  ///< CacheState::refused was set.
  kWeights,  ///< CacheState::weights are others.
  kContents  ///< CacheState::contents has grown: device blocks hold nothing.
};
struct CacheEvent {
  CacheEventKind kind = CacheEventKind::kPhase;
  std::uint64_t generation = 0;  ///< This and the next three: right after the change.
  CachePhase phase = CachePhase::kDetached;
  bool offload_ready = false;
  std::uint64_t contents = 0;
};

enum class HostPolicy : std::uint8_t { kDrop = 1, kKeep };

struct ClearSummary {
  bool quarantined = false;  ///< Some memory waits for a peer; see detail.
  std::string detail;
  std::uint64_t host_blocks_dropped = 0;
  std::uint64_t free_before = 0;  ///< Driver's view, summed over ranks.
  std::uint64_t free_after = 0;
  std::chrono::microseconds took{};
};

/// What the schedulers of an engine came to. transfers: jobs whose completions were not taken.
struct PauseSummary {
  ScheduledWork work;
  std::uint64_t transfers = 0;
  std::chrono::microseconds took{};
};

/// The caching allocator of a rank's worker around an emptying.
struct RankMemory {
  std::uint32_t rank = 0;
  bool absent = false;                ///< It has no worker, and so no cache; the rest is 0.
  std::uint64_t reserved_before = 0;  ///< Bytes taken from the driver.
  std::uint64_t reserved_after = 0;
  std::uint64_t used_after = 0;      ///< Of those, lent out.
  std::uint64_t free_on_device = 0;  ///< The driver's view afterwards.
};

struct ContinueSummary {
  std::vector<RankMemory> ranks;  ///< Nothing without empty_cache.
  std::chrono::microseconds took{};
};

struct FlushOptions {
  bool empty_cache = true;  ///< Also give what the workers' allocators cache back to the driver.
  HostPolicy host = HostPolicy::kDrop;
  std::chrono::milliseconds timeout{0};  ///< How long to wait until the engine is idle.
};
struct FlushSummary {
  std::vector<RankMemory> ranks;  ///< Nothing without FlushOptions::empty_cache.
  std::uint64_t host_blocks_dropped = 0;
  std::chrono::microseconds took{};
};

struct UpdateOptions {
  std::string file;  ///< Safetensors, read by every rank: a path that all workers can open.
  /// Instead of a file: what would be in it, sent to every rank in messages. Needs memory for a
  /// copy on every rank until the update is prepared.
  std::span<const std::byte> tensors;
  /// Instead of a file that every rank reads: one that rank 0 alone reads, and hands to the others.
  std::string distributed;
  /// Instead of a file: the name of a process that lends tensors in device memory, a
  /// WeightsExporter's; {rank} in it stands for the rank's number.
  std::string lender;
  bool flush_cache = true;  ///< Forget what every block holds first; needs an idle engine.
  bool empty_cache = false;
  /// What the new weights are known by; fresh random bytes unless the caller knows that these very
  /// weights were in use before under that name: then what is stored of them is found again.
  std::optional<Digest> weights;
  /// How long to wait until the engine is idle, where it has to be.
  std::chrono::milliseconds timeout{0};
};
struct RankUpdate {
  std::uint32_t rank = 0;
  std::uint64_t bytes = 0;  ///< Of its part.
};
struct UpdateSummary {
  Digest weights;  ///< CacheState::weights from now on.
  std::vector<RankUpdate> updates;
  std::vector<RankMemory> ranks;  ///< Nothing without UpdateOptions::empty_cache.
  std::chrono::microseconds took{};
};

using ipc::LayerTicket;
using ipc::MemoryTag;
using ipc::MemoryTags;
using ipc::WeightsBackup;
struct ReleaseOptions {
  MemoryTags tags = MemoryTags::all();
  WeightsBackup backup = WeightsBackup::kHost;
  HostPolicy host = HostPolicy::kDrop;   ///< With MemoryTag::kKvCache.
  std::chrono::milliseconds timeout{0};  ///< How long to wait until the engine is idle.
};
/// What a rank's worker gave up or took back beside the cache, in bytes.
struct ReleasedMemory {
  std::uint32_t rank = 0;
  std::uint64_t weights = 0;
  std::uint64_t scratch = 0;
};
struct ReleaseSummary {
  MemoryTags released;                ///< Of the engine, now.
  std::vector<ReleasedMemory> ranks;  ///< Nothing when the cache alone was released.
  bool quarantined = false;           ///< Some memory of the cache waits for a peer; see detail.
  std::string detail;
  std::uint64_t free_before = 0;  ///< Driver's view, summed over ranks.
  std::uint64_t free_after = 0;
  std::uint64_t host_blocks_dropped = 0;
  std::chrono::microseconds took{};
};
struct ResumeSummary {
  MemoryTags resumed;
  MemoryTags released;                ///< Of the engine, still.
  bool weights_lost = false;          ///< Released without a backup: update them, then continue.
  std::vector<ReleasedMemory> ranks;  ///< Nothing when the cache alone was resumed.
  std::uint64_t generation = 0;       ///< Acknowledged, with the cache.
  bool paused = false;                ///< Still: by a pause, or by what is not back.
  std::chrono::microseconds took{};
};

/// A component of one rank's worker.
struct RankComponent {
  std::uint32_t rank = 0;
  ipc::ComponentState state;
  std::uint64_t device_bytes_before = 0;  ///< Of a release.
  bool emptied = false;                   ///< The allocator, after its release.
};

struct ClientStats {
  std::uint64_t jobs_submitted = 0;
  std::uint64_t jobs_completed = 0;
  std::uint64_t jobs_failed = 0;
  std::uint64_t reconnects = 0;
  std::uint64_t events_dropped = 0;  ///< The oldest, beyond 1024 that nobody took.
};

/// An engine's connection. It reconnects by itself when the manager is replaced; jobs of the lost
/// manager complete with kPeerDied once the movers are known to be idle.
/// @threading one thread at a time; give each thread its own client or lock around one.
/// @lifetime close() or the destructor gives up all pins and reservations; running jobs finish. A
/// child that the process forks has no part in it: there calls fail with kCancelled or return
/// nothing, fd() is still the parent's, close() and the destructor do nothing, and it connects a
/// client of its own if it wants one.
class Client {
 public:
  /// Waits for a manager until the deadline (kNoManager), but not for workers: see wait_ready().
  /// At once: kVersionMismatch, kGeometryMismatch (fingerprint or ranks differ from the registered
  /// workers'), kPermission (runtime directory), kTimeout (a manager that does not answer).
  [[nodiscard]] static Result<std::unique_ptr<Client>> connect(ClientOptions options,
                                                               Deadline deadline);
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  ~Client();
  void close();

  /// For the caller's event loop: readable when poll() or events() may return something. Stable for
  /// the client's life, over reconnects, too. Poll for reading; never read from it.
  [[nodiscard]] int fd() const noexcept;
  /// Last known state; refreshed by poll() and by every call. Looking at it acknowledges its
  /// generation: submits name the generation acknowledged last, so that work which was decided on
  /// before a clear ends as kStaleEpoch instead of touching blocks that are now another arena's.
  /// What is looked at has to be obeyed, therefore: CacheState::contents, before the next submit.
  [[nodiscard]] const CacheState& state() const noexcept;
  /// Ok once phase is kReady (and offload_ready when asked); completions that arrive meanwhile are
  /// kept for poll(). Ok acknowledges the generation, as state() does. kTimeout; kGeometryMismatch
  /// at once when the workers that came are not this client's (CacheState::refused).
  [[nodiscard]] Status wait_ready(bool offload, Deadline deadline);

  /// Changes of the state since the last call, in their order, the first connection's left out.
  /// Looks for news as poll() does; never blocks. Nothing unless ClientOptions::events.
  [[nodiscard]] std::vector<CacheEvent> events();

  // Errors of every call below that has a deadline: kNoManager (none is connected; it reconnects by
  // itself), kTimeout and kPeerDied (nobody knows whether it took effect), kCancelled (closed),
  // kGeometryMismatch (CacheState::refused), kNotReady (no worker has registered yet), and
  // kInvalidArgument for no element or more than a message holds. Those named at a call come on
  // top.

  // Looks at the host tier without a message, by a read-only mapping of the manager's prefix table:
  // neither waits for anybody, and as many engines as there are look at once. What they find is
  // what was there a moment ago; a load takes what is there then, and says of each block whether it
  // was. pin_blocks() keeps what was found until it is loaded, as far as it has not gone yet. By
  // the state that was known after the last call of another kind. A look is no use: what a request
  // uses is told once, however often it was looked for.

  /// How much of a prefix can be loaded. What it finds of blocks that were stored without
  /// StoreTarget::before is what use_prefix() has joined since. kNoManager, kCancelled, kNotReady,
  /// kGeometryMismatch as below.
  [[nodiscard]] Result<PrefixMatch> match_prefix(std::span<const Digest> hashes);
  /// The same for a prefix that lies in store units as StoreUnits says, of the size that the
  /// client's identity has: how many of its blocks can be loaded, in whole units and in a partial
  /// last one that a prefix which ended there has left.
  [[nodiscard]] Result<std::uint32_t> match_in_units(std::span<const Digest> hashes);
  /// Of one block; kMiss also where match_prefix() would fail.
  [[nodiscard]] Presence presence(GroupId group, const Digest& hash);
  /// A request uses these blocks of one prefix, first to last: those of them that are in host
  /// memory are kept in preference to others. Sends and does not wait: kNoManager, kCancelled,
  /// kBusy, and kInvalidArgument for more than a message holds.
  [[nodiscard]] Status use_prefix(std::span<const Digest> hashes);

  /// Which blocks the host tier has, as the manager says. An empty span is an empty result.
  [[nodiscard]] Result<LookupResult> lookup(std::span<const Digest> hashes, Deadline deadline);
  /// Pinned blocks are not evicted; counts how many were present (in any group): those that were
  /// not are no error. Pins are counted per client, and end with it or with a clear that drops the
  /// host tier.
  [[nodiscard]] Result<std::uint32_t> pin(std::span<const Digest> hashes, Deadline deadline);
  /// Takes one pin of each back; counts those that had one of this client's.
  [[nodiscard]] Result<std::uint32_t> unpin(std::span<const Digest> hashes, Deadline deadline);
  /// A look and the pins of what it finds in one: of each whether it is there, and cannot go before
  /// it is unpinned, as often as it was pinned. For what is to be loaded next, after a look that
  /// pins nothing. After kTimeout nothing is pinned.
  [[nodiscard]] Result<std::vector<bool>> pin_blocks(std::span<const PinnedBlock> blocks,
                                                     Deadline deadline);
  /// The same for loads of some parts of store units, which a look shows whole: of one that lacks
  /// any of them it says which, and does not pin it.
  [[nodiscard]] Result<std::vector<PinOutcome>> pin_parts(std::span<const PinWanted> wanted,
                                                          Deadline deadline);
  /// Takes one pin of each back: of those that were pinned, as the two above said. A load that was
  /// submitted before keeps what it needs. Sends and does not wait: kNoManager (the pins are over),
  /// kCancelled, kBusy (retry).
  [[nodiscard]] Status unpin_blocks(std::span<const PinnedBlock> blocks);

  /// Room for blocks that are to be stored, one answer per target: kFull when nothing can be
  /// evicted, kInUse while another store of the block is under way, which may fail, and for a unit
  /// that lacks parts and cannot give way now. A slot is this client's
  /// until a submit or abandon_store() names it; the client's end gives it up, a clear that drops
  /// the host tier, too. kNotReady while the cache is not ready, kInvalidArgument for a group that
  /// the engine does not have, or a retention of a priority or duration that there is not,
  /// kStaleEpoch when the weights were updated since state() was looked at.
  [[nodiscard]] Result<std::vector<StoreSlot>> reserve_store(std::span<const StoreTarget> targets,
                                                             Deadline deadline);
  /// Sends and does not wait. kNoManager, kCancelled, kBusy (queue full, retry); slots that are no
  /// longer this client's are no error.
  [[nodiscard]] Status abandon_store(std::span<const std::uint64_t> slots);

  /// Submits are answered by one Completion each, refusals included (kBusy: queue full, retry;
  /// kStaleEpoch, kNotReady, kInvalidArgument). An error here means nothing was sent: kNoManager,
  /// kCancelled (closed), kBusy, kInvalidArgument for no item or more than a message holds, or for
  /// a retention of a duration that there is not.
  /// @pre the writes of the source blocks were observed complete on every rank.
  ///
  /// With layers the store goes layer by layer, behind the compute that writes them, whose end
  /// nobody has to observe: that use has begun on every rank (LayerWords::begin) and the streams
  /// there mark each layer. It ends with an error, as a whole, when the compute does not get there
  /// in time.
  [[nodiscard]] Result<JobId> submit_store(std::span<const StoreItem> items,
                                           std::optional<LayerTicket> layers = std::nullopt);
  /// reserve_store() and submit_store() of what gets room, in one message: nobody waits for the
  /// manager. Of each item, slot is the place of its target among targets, all of which are named.
  /// Those that get no room are not copied, which fails nothing else, and end with a result of
  /// their own: kAlreadyExists (Reservation::kAlreadyThere), kNoHostMemory (kFull), kNotIdle
  /// (kInUse). Of a target with parts, items have to bring all of them. Refused as a whole as both
  /// of those.
  /// @pre as submit_store()
  [[nodiscard]] Result<JobId> offer_store(std::span<const StoreTarget> targets,
                                          std::span<const StoreItem> items,
                                          std::optional<LayerTicket> layers = std::nullopt);
  /// A use of a layer slot that is newer than all that any client on this machine has been given
  /// before, by the machine's monotonic clock: so a worker takes it whoever had the slot before,
  /// an engine that died included, whose jobs that are late are refused. Also the first one of
  /// several that are counted up by one, on each rank by itself, say.
  [[nodiscard]] LayerTicket layer_ticket(std::uint32_t slot);
  /// Higher priority goes first among loads: ipc::Urgency::kAhead for what is fetched ahead,
  /// kOrdinary for what is waited for, more for what is to go before that. Stores go the other way,
  /// and do not wait for loads or hold them up. Per block: kNotFound when the host tier does not
  /// have it (any more).
  ///
  /// due: when it is of no more use unless it has begun by then, such as a prefetch for a step that
  /// recomputes what is missing. Of loads of one priority what is due first goes first, before all
  /// that are never due; one that no mover has been given by then ends with kTimeout, and nothing
  /// of it is done. One that was begun goes on to its end.
  ///
  /// With layers the load goes layer by layer, and says so on every rank (LayerWords), so that
  /// compute may start before the completion is here: all blocks are loaded, or the use has failed,
  /// kNotFound included.
  [[nodiscard]] Result<JobId> submit_load(std::span<const LoadItem> items,
                                          std::uint8_t priority,
                                          std::optional<LayerTicket> layers = std::nullopt,
                                          std::optional<ipc::TimePoint> due = std::nullopt);
  /// The same for blocks that another engine of the same model and weights is storing, or is about
  /// to, on this host: a prefill's, for the decode that goes on with them. Each block is copied
  /// when every rank has stored it; the completion comes when all have, or at `until`, when those
  /// that were not stored, or not begun to be copied, end with kTimeout. What is there goes at
  /// once.
  [[nodiscard]] Result<JobId> submit_load_when_stored(std::span<const LoadItem> items,
                                                      std::uint8_t priority,
                                                      ipc::TimePoint until);
  /// A running sequence by its owner's handle: survives a weights update, is never indexed.
  /// Swapping out under a handle that is taken replaces the blocks of the indices named. All blocks
  /// or none, and nothing is evicted for those that could not fit: kNoHostMemory when eviction
  /// cannot make room for them, kBusy while the host pool is still being filled and has no room for
  /// them yet. The blocks that they replace stay until then, and are no room for them.
  [[nodiscard]] Result<JobId> swap_out(std::uint64_t sequence, std::span<const SequenceItem> items);
  /// Per block kNotFound: never swapped out, or dropped; kGeometryMismatch: by workers of another
  /// geometry. The sequence stays on the host. Goes as a load of priority Urgency::kOrdinary.
  /// Both take any of a sequence's blocks: one that is larger than the device computes in windows
  /// of them (`kvferry longctx`).
  [[nodiscard]] Result<JobId> swap_in(std::uint64_t sequence, std::span<const SequenceItem> items);
  /// kNotFound when this client has no such sequence.
  [[nodiscard]] Status drop_sequence(std::uint64_t sequence, Deadline deadline);
  /// Asks for it; the completion says how it ended. Ok also when it has ended already. kNoManager,
  /// kCancelled (closed), kBusy.
  [[nodiscard]] Status cancel(JobId job);

  /// Since when the manager owes an answer to a submit, which it gives when it takes the job:
  /// nothing when it has taken or refused all. What is older than a second means that it stands
  /// still, and that nothing more should be given to it. A manager that ends owes nothing. Looks
  /// for answers, never blocks.
  [[nodiscard]] std::optional<ipc::TimePoint> unanswered_since();
  /// Waits until it owes none. kTimeout, kCancelled (closed).
  [[nodiscard]] Status wait_answered(Deadline deadline);

  /// Completions that have arrived, at most max. Never blocks.
  [[nodiscard]] std::vector<Completion> poll(std::size_t max);
  /// Waits for all of these jobs; other completions are kept for poll(). kNotFound for one that was
  /// never submitted or whose completion was taken, kTimeout (they run on), kCancelled (closed).
  [[nodiscard]] Result<std::vector<Completion>> wait(std::span<const JobId> jobs,
                                                     Deadline deadline);
  /// The fence for preemption and abort: true at once when no unfinished job touches any of these
  /// device blocks, else calls back from poll() when that is so.
  [[nodiscard]] bool release_when_done(GroupId group,
                                       std::span<const BlockId> blocks,
                                       std::function<void()> released);

  /// Gives the device memory of this engine's cache back to the driver, on all ranks, and ends the
  /// generation; see docs/handshake.md. A summary that is quarantined is a success that names what
  /// waits for a peer. Else the first rank's error: kNotReady (a rank has no owner, or none has
  /// registered at a young manager: retry), kTimeout, kCuda; kBusy while another clear or re-init
  /// runs.
  [[nodiscard]] Result<ClearSummary> clear(HostPolicy host, Deadline deadline);
  /// Allocates the cache again and waits until all ranks have it mapped. gpu_blocks 0: as before.
  /// Returns the new generation, which is thereby acknowledged. kBusy when it is there already or
  /// another clear or re-init runs, kNotReady without a worker or owner on some rank,
  /// kNoDeviceMemory, kQuarantined (no memory, and some waits for a peer).
  [[nodiscard]] Result<std::uint64_t> reinit(std::uint32_t gpu_blocks, Deadline deadline);

  // Pause, continue and flush, of this engine; docs/lifecycle.md says what each does. They are
  // answered when all schedulers and ranks have done it. kBusy while another such command runs. A
  // client with a scheduler of its own obeys in these calls as it does in poll(), but its caller
  // can end no request meanwhile: with requests running, another client asks.

  /// Ok when it is in effect, also when it was before; another mode than the one in force takes its
  /// place. kTimeout: it stays ordered, and takes effect when it can. kInvalidArgument: a client of
  /// the engine has no scheduler.
  [[nodiscard]] Result<PauseSummary> pause(PauseMode mode, Deadline deadline);
  /// kNotPaused; kNotReady while memory is released, or its weights were lost. Empties the caching
  /// allocator of every rank's worker first, unless told not to; when that fails on some rank, the
  /// engine stays paused and the error names it.
  [[nodiscard]] Result<ContinueSummary> continue_generation(bool empty_cache, Deadline deadline);
  /// Forgets what every block holds, on the device and (HostPolicy) in host memory; device memory
  /// stays mapped and is not zeroed. kNotIdle, with what is left to do, when requests hold blocks
  /// or copies run, after the timeout: nothing has changed then. kNotReady when no scheduler is
  /// connected, kInvalidArgument when the deadline leaves no time behind the timeout.
  [[nodiscard]] Result<FlushSummary> flush(const FlushOptions& options, Deadline deadline);

  /// New weights for all ranks, prepared on every one before any of them changes. The engine has to
  /// be paused or idle, and with flush_cache idle in any case: else kNotIdle, before anything is
  /// loaded. What fails before the commit (kNotFound, kInvalidArgument, kGeometryMismatch, kTimeout
  /// and so on) leaves the old weights and their identity on every rank. After an error in the
  /// commit itself, or the death of a worker in it, the engine stays paused until an update
  /// succeeds.
  [[nodiscard]] Result<UpdateSummary> update_weights(const UpdateOptions& options,
                                                     Deadline deadline);

  /// Gives device memory of an idle engine back to the driver, and holds its requests until all of
  /// it is resumed: the cache as clear() does (by the handshake, its generation ends), weights and
  /// scratch memory as the workers' WorkerHooks::memory does. Of what is released already: nothing,
  /// and no error. kNotIdle as flush(); kNotReady without a worker or owner on some rank;
  /// kInvalidArgument for weights or scratch memory of workers without that hook. After any error
  /// the rank it names has all that the error is about; what else was released stays so, and can be
  /// released again, or resumed.
  [[nodiscard]] Result<ReleaseSummary> release_memory(const ReleaseOptions& options,
                                                      Deadline deadline);
  /// Takes it again, on all ranks; tags empty: all that is released. The weights hold what they
  /// held, the cache is empty, in a new generation. An engine that was not paused before the
  /// release runs again when everything is back. kNotReleased for a tag that is not;
  /// kNoDeviceMemory, kQuarantined: that stays released, and can be resumed later.
  [[nodiscard]] Result<ResumeSummary> resume_memory(MemoryTags tags, Deadline deadline);

  /// What the workers of all ranks have on the device beside the cache (WorkerHooks::components). A
  /// pure observation.
  [[nodiscard]] Result<std::vector<RankComponent>> components(Deadline deadline);
  /// Ends the use of components on all ranks: each gives up what its strategy gives up, and takes
  /// it again when it is used; the allocator is emptied by the rule for large releases
  /// (components.hpp). Requests go on meanwhile. names: 1 to 64; empty: all. kNotFound for a name
  /// that a rank does not have, which releases nothing of its others; kNotReady for a rank without
  /// a worker. After an error other ranks have released theirs, and it can be repeated.
  [[nodiscard]] Result<std::vector<RankComponent>> release_components(
      const std::vector<std::string>& names, Deadline deadline);

  /// JSON of docs/operations.md.
  [[nodiscard]] Result<std::string> status(Deadline deadline);
  [[nodiscard]] const ClientStats& stats() const noexcept;

 private:
  Client();
  [[nodiscard]] Result<Digest> send_weights(std::span<const std::byte> tensors, Deadline deadline);
  class Impl;
  ipc::HomeProcess home_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::worker
