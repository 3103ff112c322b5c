// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/index/prefix_rules.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/model/layer_ticket.hpp"
#include "kvferry/ipc/model/urgency.hpp"
#include "kvferry/ipc/rank/memory_user.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Every message of the control plane (ZeroMQ) and the registry (SEQPACKET).
/// Adding, removing or reordering a field means: bump kWireVersion.
namespace kvferry::ipc {

inline constexpr std::uint32_t kWireVersion = 23;

constexpr std::uint64_t wire_max(DataType) { return static_cast<std::uint64_t>(DataType::kUint8); }
constexpr std::uint64_t wire_max(RegionKind) {
  return static_cast<std::uint64_t>(RegionKind::kOther);
}
constexpr std::uint64_t wire_max(HitRule) {
  return static_cast<std::uint64_t>(HitRule::kLastState);
}
constexpr std::uint64_t wire_max(ArenaOrder) {
  return static_cast<std::uint64_t>(ArenaOrder::kBlockFirst);
}
constexpr std::uint64_t wire_max(CacheOwner) {
  return static_cast<std::uint64_t>(CacheOwner::kMover);
}
constexpr std::uint64_t wire_max(ProcessKind) {
  return static_cast<std::uint64_t>(ProcessKind::kManager);
}
constexpr std::uint64_t wire_max(HandleKind) {
  return static_cast<std::uint64_t>(HandleKind::kVmm);
}
constexpr std::uint64_t wire_min(LeasePhase) { return 0; }
constexpr std::uint64_t wire_max(LeasePhase) {
  return static_cast<std::uint64_t>(LeasePhase::kShutdown);
}
constexpr std::uint64_t wire_max(ClearKind) {
  return static_cast<std::uint64_t>(ClearKind::kQuarantined);
}
constexpr std::uint64_t wire_max(CopyDirection) {
  return static_cast<std::uint64_t>(CopyDirection::kHostToDevice);
}
constexpr std::uint64_t wire_max(ErrorCode) {
  return static_cast<std::uint64_t>(ErrorCode::kCorrupt);
}

/// What an Envelope carries. Requests are answered by an envelope of the same kind and request id
/// with is_reply set and either the reply body or an error. Events have request id 0.
enum class MessageKind : std::uint16_t {
  // engine and operator -> manager, answered
  kEngineHello = 1,
  kLookup,
  kUsePrefix,
  kPin,
  kUnpin,
  kReserveStore,
  kAbandonStore,
  kSubmitStore,
  kSubmitLoad,
  kCancel,
  kSwapOut,
  kSwapIn,
  kDropSequence,
  kClear,
  kReinit,
  kPause,
  kContinue,
  kFlush,
  kUpdateWeights,
  kWeightsPart,
  kStatus,
  // manager -> engine, events
  kJobDone,
  kEngineState,
  // manager -> engine, answered
  kSchedule,
  // worker and mover -> manager
  kRankHello,
  kRankState,
  // manager -> worker and mover, answered
  kRankClear,
  kRankReinit,
  kRankEmpty,
  kRankWeights,
  kRankWeightsPart,
  kQuiesceStaging,
  // manager -> mover / mover -> manager
  kMoverJob,
  kMoverCancel,
  kMoverJobDone,
  // engine -> worker (step channel), answered
  kStepHello,
  kStep,
  kDecode,
  kWorkerMemory,
  // user -> scheduler of reference workers (generation channel), answered
  kGenerate,
  // Either way: the peer ends in an orderly way.
  kBye,
  // manager -> worker, answered
  kRankWeightsRead,
  // engine and operator -> manager, answered
  kReleaseMemory,
  kResumeMemory,
  // manager -> worker, answered
  kRankRelease,
  kRankResume,
  // engine and operator -> manager, answered
  kComponents,
  // manager -> worker, answered
  kRankComponents,
  kRankBroadcast,
  // manager -> worker, event
  kLayersFailed,
  // mover -> manager, event
  kMoverSums,
  // engine -> manager, answered
  kOfferStore,
  // manager -> mover, mover -> manager, events
  kTellSums,
  kKeptSums,
  // engine -> manager, answered
  kPinBlocks,
  kUnpinBlocks
};
/// "submit_store" for kSubmitStore.
[[nodiscard]] std::string_view to_string(MessageKind kind) noexcept;
constexpr std::uint64_t wire_max(MessageKind) {
  return static_cast<std::uint64_t>(MessageKind::kUnpinBlocks);
}

struct Envelope {
  std::uint32_t version = kWireVersion;
  MessageKind kind = MessageKind::kBye;
  /// 0 for events. Ids grow in a process's life. Repeating one repeats the reply, or is refused as
  /// kStaleEpoch when that is forgotten (ControlServer::reply).
  RequestId request;
  bool is_reply = false;
  std::optional<Error> error;  ///< Replies only.
  Bytes body;
  template <typename V> void visit(V& v) { v(version, kind, request, is_reply, error, body); }
};

// ---- registry (SEQPACKET, once per peer; the connection stays open as liveness doorbell) ----

struct RegistryHello {
  std::uint32_t version = kWireVersion;
  ProcessKind kind = ProcessKind::kOperator;
  IncarnationId incarnation;  ///< Also the ZeroMQ routing id of the peer (its 16 bytes).
  std::string name;           ///< For people: "mover chat/0".
  bool wants_rings = false;   ///< For its messages; what fits neither goes over ZeroMQ.
  template <typename V> void visit(V& v) { v(version, kind, incarnation, name, wants_rings); }
};
/// Movers also get the descriptors of the pool and its catalogue, engines the prefix table's; who
/// has rings gets theirs, last.
struct RegistryWelcome {
  std::uint32_t version = kWireVersion;
  SessionId manager_session;
  std::uint64_t pool_bytes = 0;
  std::optional<Error> refused;
  std::uint64_t ring_connection = 0;  ///< Names the connection in its messages; 0: no rings.
  std::uint64_t table_bytes = 0;      ///< Of the prefix table; 0: it has none.
  Digest pool;                        ///< Names the pool over the lives of its managers.
  std::uint64_t catalogue_bytes = 0;  ///< 0: the pool has no catalogue.
  template <typename V> void visit(V& v) {
    v(version, manager_session, pool_bytes, refused, ring_connection, table_bytes, pool,
      catalogue_bytes);
  }
};

// ---- worker and mover -> manager ----

struct RankHello {
  std::string engine;
  Rank rank;
  ProcessKind kind = ProcessKind::kWorker;
  CacheOwner cache_owner = CacheOwner::kWorker;
  HandleKind handles = HandleKind::kVmm;
  ArenaOrder order = ArenaOrder::kLayerFirst;
  Geometry geometry;
  std::string device;  ///< DeviceSpec::to_string().
  std::string link;    ///< What its copies go over; who names the same one shares it.
  // Limits of its own, in bytes a second; 0: none.
  std::uint64_t store_rate = 0;
  std::uint64_t load_rate = 0;
  template <typename V> void visit(V& v) {
    v(engine, rank, kind, cache_owner, handles, order, geometry, device, link, store_rate,
      load_rate);
  }
};
/// Sent after the hello and at every change; the manager keeps the latest.
struct RankState {
  SessionId session;
  Epoch epoch;
  LeasePhase phase = LeasePhase::kVacant;
  bool mapped = false;
  LeaseId prepared_by;  ///< LeaseView::prepared_by.
  std::vector<std::uint32_t> group_blocks;
  std::vector<IncarnationId> lease_holders;  ///< Owner: who may have an epoch mapped.
  std::uint64_t quarantined_bytes = 0;
  std::uint64_t device_free_bytes = 0;
  std::uint64_t device_total_bytes = 0;
  Digest weights;  ///< Identity of those that a worker computes with; zero: not kvferry's matter.
  MemoryTags released;        ///< A worker's, without the cache.
  bool weights_lost = false;  ///< Released without a backup, and not updated since.
  std::string note;
  template <typename V> void visit(V& v) {
    v(session, epoch, phase, mapped, prepared_by, group_blocks, lease_holders, quarantined_bytes,
      device_free_bytes, device_total_bytes, weights, released, weights_lost, note);
  }
};

// ---- manager -> worker and mover ----

struct RankClear {  ///< Idempotent: clear of a cleared epoch repeats the outcome.
  SessionId session;
  Epoch epoch;
  std::chrono::milliseconds deadline{8000};
  template <typename V> void visit(V& v) { v(session, epoch, deadline); }
};
struct RankClearReply {
  ClearKind kind = ClearKind::kCleared;
  Epoch epoch;
  std::string detail;
  std::uint64_t quarantined_bytes = 0;
  std::uint64_t free_before = 0;
  std::uint64_t free_after = 0;
  std::chrono::microseconds took{};
  template <typename V> void visit(V& v) {
    v(kind, epoch, detail, quarantined_bytes, free_before, free_after, took);
  }
};
struct RankReinit {              ///< To the owner: next epoch. To the attacher: wait until mapped.
  SessionId session;             ///< The owner's, which the epoch is counted in.
  Epoch epoch;                   ///< The attacher waits for at least this one.
  std::uint32_t gpu_blocks = 0;  ///< 0: as before.
  std::chrono::milliseconds deadline{8000};
  template <typename V> void visit(V& v) { v(session, epoch, gpu_blocks, deadline); }
};
struct RankReinitReply {
  SessionId session;
  Epoch epoch;
  std::chrono::microseconds took{};
  template <typename V> void visit(V& v) { v(session, epoch, took); }
};
/// To the worker: answered when no gather or scatter of the movers meant is queued or running any
/// more. Then, and only then, their blocks may be used again. After a mover's death: that mover,
/// which is shut out for good. Before a mover's first job: all others, whether or not this manager
/// ever knew them.
struct QuiesceStaging {
  IncarnationId mover;
  bool others = false;  ///< Means every mover but that one; none is shut out.
  std::chrono::milliseconds deadline{3000};
  template <typename V> void visit(V& v) { v(mover, others, deadline); }
};

/// To the worker: a job with that ticket ended with an error, so that nobody may go on waiting for
/// its layers.
struct LayersFailed {
  LayerTicket ticket;
  Error error;
  template <typename V> void visit(V& v) { v(ticket, error); }
};

struct MoverItem {
  GroupId group;
  BlockId block;
  std::uint64_t replicated_offset = 0;  ///< Into the pool.
  std::uint64_t shard_offset = 0;       ///< Into the pool; this rank's part.
  bool with_replicated = true;          ///< Stores: only one rank stores it. Loads: always true.
  // Loads: checksums of the contents, which are checked; 0: not.
  std::uint64_t replicated_sum = 0;
  std::uint64_t shard_sum = 0;
  template <typename V> void visit(V& v) {
    v(group, block, replicated_offset, shard_offset, with_replicated, replicated_sum, shard_sum);
  }
};
struct MoverJob {
  JobId job;
  SessionId session;
  Epoch epoch;
  CopyDirection direction = CopyDirection::kDeviceToHost;
  Urgency urgency;
  bool brief = false;                 ///< Over so soon that the mover does not sleep meanwhile.
  std::optional<LayerTicket> layers;  ///< Goes layer by layer, in step with the worker's compute.
  bool wants_sums = false;            ///< A store's checksums, when they are computed: MoverSums.
  std::vector<MoverItem> items;
  bool sums_first = false;  ///< With wants_sums: the answer waits for them, and has them.
  template <typename V> void visit(V& v) {
    v(job, session, epoch, direction, urgency, brief, layers, wants_sums, items, sums_first);
  }
};
struct MoverCancel {
  JobId job;
  template <typename V> void visit(V& v) { v(job); }
};
struct MoverJobDone {
  JobId job;
  std::vector<std::uint8_t> results;  ///< Per item: 0 or an ErrorCode.
  std::string message;                ///< First error's text.
  std::uint64_t bytes = 0;
  std::chrono::microseconds queued{};
  std::chrono::microseconds copied{};
  std::vector<std::uint64_t> replicated_sums;  ///< As of MoverSums, of a store with sums_first.
  std::vector<std::uint64_t> shard_sums;
  template <typename V> void visit(V& v) {
    v(job, results, message, bytes, queued, copied, replicated_sums, shard_sums);
  }
};

/// Of a store that was answered, some time later, or never: checksums of what it left in the pool,
/// by item; 0 for what failed, or was not this rank's to store.
struct MoverSums {
  JobId job;
  std::vector<std::uint64_t> replicated;
  std::vector<std::uint64_t> shard;
  template <typename V> void visit(V& v) { v(job, replicated, shard); }
};

/// Of what a job of an earlier manager stored there: the job tells it from what was there before.
struct KeptSum {
  JobId job;
  std::uint64_t offset = 0;  ///< Into the pool: MoverItem::replicated_offset, or shard_offset.
  std::uint64_t sum = 0;
  template <typename V> void visit(V& v) { v(job, offset, sum); }
};
/// A mover's answers to kTellSums: checksums that the earlier manager may not have heard of, as
/// they are computed.
struct KeptSums {
  std::vector<KeptSum> sums;
  bool is_last = false;
  template <typename V> void visit(V& v) { v(sums, is_last); }
};

// ---- engine -> manager ----

/// How a pause treats the requests that run; see docs/lifecycle.md.
enum class PauseMode : std::uint8_t { kAbort = 1, kRetract, kInPlace };
constexpr std::uint64_t wire_max(PauseMode) {
  return static_cast<std::uint64_t>(PauseMode::kInPlace);
}
/// "abort", "retract", "in_place".
[[nodiscard]] std::string_view to_string(PauseMode mode) noexcept;

/// Answered with EngineState, and only once no job of an earlier connection of this engine still
/// copies as far as this manager knows.
struct EngineHello {
  std::string engine;
  std::string name_space = "default";
  std::string model;
  Digest weights;
  std::uint32_t ranks = 1;
  Digest fingerprint;
  bool schedules = false;                ///< Obeys kSchedule.
  std::optional<PauseMode> paused;       ///< The pause in force, which an earlier manager ordered.
  bool paused_by_release = false;        ///< It was for a release: its last resume ends it.
  std::optional<Digest> name_space_key;  ///< ModelIdentity::name_space_key.
  std::uint32_t unit_blocks = 1;         ///< ModelIdentity::unit_blocks.
  template <typename V> void visit(V& v) {
    v(engine, name_space, model, weights, ranks, fingerprint, schedules, paused, paused_by_release,
      name_space_key, unit_blocks);
  }
};
/// Session, epoch and prepared_by name the contents of a rank's device blocks, on which worker is.
struct RankArena {
  SessionId session;
  Epoch epoch;
  LeaseId prepared_by;
  IncarnationId worker;
  template <typename V> void visit(V& v) { v(session, epoch, prepared_by, worker); }
};
/// What an engine sees of its cache. generation grows whenever the contents of any rank are others;
/// device blocks of an older generation hold nothing any more. It stays when only a worker is
/// another one.
enum class CachePhase : std::uint8_t { kDetached = 1, kReady, kClearing, kCleared };
constexpr std::uint64_t wire_max(CachePhase) {
  return static_cast<std::uint64_t>(CachePhase::kCleared);
}
struct EngineState {
  std::uint64_t generation = 0;
  CachePhase phase = CachePhase::kDetached;
  bool offload_ready = false;  ///< Every rank has a mover with the arena mapped.
  std::vector<RankArena> ranks;
  std::vector<std::uint32_t> group_blocks;
  Digest weights;  ///< Of all ranks' workers together; part of every key. Zero: they name none.
  Digest root;     ///< Of this client's keys, in the prefix table.
  std::vector<GroupRule> rules;  ///< Of the groups; empty while no worker has registered.
  std::string note;
  /// The workers registered after this engine, and with another geometry: it cannot use them.
  std::optional<Error> refused;
  template <typename V> void visit(V& v) {
    v(generation, phase, offload_ready, ranks, group_blocks, weights, root, rules, note, refused);
  }
};

enum class BlockPresence : std::uint8_t { kMiss = 1, kHitPending, kHit };
constexpr std::uint64_t wire_max(BlockPresence) {
  return static_cast<std::uint64_t>(BlockPresence::kHit);
}
struct Lookup {
  std::vector<Digest> blocks;  ///< A prefix: first block first.
  template <typename V> void visit(V& v) { v(blocks); }
};
struct LookupReply {
  std::uint32_t usable_prefix = 0;     ///< Longest by every group's rule, all ranks stored.
  std::vector<std::uint8_t> presence;  ///< [group * blocks + i], BlockPresence.
  template <typename V> void visit(V& v) { v(usable_prefix, presence); }
};
/// A request uses these blocks of one prefix, first to last. Nothing that is answered.
struct UsePrefix {
  std::vector<Digest> blocks;
  template <typename V> void visit(V& v) { v(blocks); }
};
struct PinRequest {  ///< kPin and kUnpin. Pins end with their engine.
  std::vector<Digest> blocks;
  template <typename V> void visit(V& v) { v(blocks); }
};
struct PinReply {
  std::uint32_t pinned = 0;
  template <typename V> void visit(V& v) { v(pinned); }
};
struct PinnedBlock {
  GroupId group;
  Digest key;
  template <typename V> void visit(V& v) { v(group, key); }
};
/// kPinBlocks and kUnpinBlocks: the same of single groups' blocks.
struct PinBlocks {
  std::vector<PinnedBlock> blocks;
  /// Of each that have to be there to be pinned, a bit for each; 0: whichever are. kUnpinBlocks: as
  /// the pins named them that are taken back and whose answers are not known, else no elements.
  std::vector<std::uint64_t> parts;
  template <typename V> void visit(V& v) { v(blocks, parts); }
};
struct PinBlocksReply {
  std::vector<std::uint8_t> done;      ///< Of each 1, or 0: it is not there (unpin: not pinned).
  std::vector<std::uint64_t> lacking;  ///< Of each, parts that it was to have and has not.
  template <typename V> void visit(V& v) { v(done, lacking); }
};

struct LoadItem {
  GroupId group;
  BlockId block;
  Digest key;
  std::uint32_t part = 0;  ///< Which device block of the store unit this is.
  template <typename V> void visit(V& v) { v(group, block, key, part); }
};
struct SubmitLoad {
  JobId job;
  std::uint64_t generation = 0;
  Urgency urgency{Urgency::kOrdinary};
  std::optional<LayerTicket> layers;  ///< Then all blocks are loaded, or none counts.
  std::vector<LoadItem> items;
  bool waits = false;  ///< Until it is due, for blocks that are not there (yet).
  template <typename V> void visit(V& v) { v(job, generation, urgency, layers, items, waits); }
};
struct CancelJob {
  JobId job;
  template <typename V> void visit(V& v) { v(job); }
};
struct SequenceBlock {
  GroupId group;
  BlockId block;
  std::uint32_t index = 0;  ///< Place of the block in the sequence.
  template <typename V> void visit(V& v) { v(group, block, index); }
};
struct SwapSequence {  ///< kSwapOut and kSwapIn.
  JobId job;
  std::uint64_t generation = 0;
  std::uint64_t sequence = 0;  ///< The owner's handle.
  std::vector<SequenceBlock> items;
  template <typename V> void visit(V& v) { v(job, generation, sequence, items); }
};
struct DropSequence {
  std::uint64_t sequence = 0;
  template <typename V> void visit(V& v) { v(sequence); }
};
/// Every accepted job is answered by exactly one of these, whatever dies, and only after no copier
/// touches its blocks any more.
struct JobDone {
  JobId job;
  std::vector<std::uint8_t> results;  ///< Per item: 0 or an ErrorCode, over all ranks.
  std::string message;
  std::uint64_t bytes = 0;
  template <typename V> void visit(V& v) { v(job, results, message, bytes); }
};

// ---- operator (and engine) -> manager ----

enum class HostPolicy : std::uint8_t { kDrop = 1, kKeep };
constexpr std::uint64_t wire_max(HostPolicy) {
  return static_cast<std::uint64_t>(HostPolicy::kKeep);
}
struct ClearRequest {
  std::string engine;  ///< Empty: all.
  HostPolicy host = HostPolicy::kDrop;
  std::chrono::milliseconds deadline{15000};
  template <typename V> void visit(V& v) { v(engine, host, deadline); }
};
struct RankOutcome {
  std::string engine;
  Rank rank;
  RankClearReply outcome;
  bool again = false;  ///< Was cleared before: the outcome is that clear's.
  std::optional<Error> error;
  template <typename V> void visit(V& v) { v(engine, rank, outcome, again, error); }
};
struct ClearReply {  ///< The envelope's error names the first failing rank.
  std::vector<RankOutcome> ranks;
  std::uint64_t host_blocks_dropped = 0;
  std::chrono::microseconds took{};
  template <typename V> void visit(V& v) { v(ranks, host_blocks_dropped, took); }
};
struct ReinitRequest {
  std::string engine;
  std::uint32_t gpu_blocks = 0;
  std::chrono::milliseconds deadline{15000};
  template <typename V> void visit(V& v) { v(engine, gpu_blocks, deadline); }
};
struct ReinitReply {
  std::uint64_t generation = 0;
  std::chrono::microseconds took{};
  template <typename V> void visit(V& v) { v(generation, took); }
};
struct StatusReply {
  std::string json;  ///< docs/operations.md describes the fields.
  template <typename V> void visit(V& v) { v(json); }
};
struct Empty {
  bool unused = false;
  template <typename V> void visit(V& v) { v(unused); }
};

// ---- engine -> worker: the reference runner's step channel ----

struct SeededItem {
  GroupId group;
  BlockId block;
  std::uint64_t seed = 0;
  template <typename V> void visit(V& v) { v(group, block, seed); }
};
struct StepBlock {
  GroupId group;
  BlockId block;
  template <typename V> void visit(V& v) { v(group, block); }
};
struct Step {  ///< Done in this order: fills (prefill), reads (decode), verifies.
  SessionId session;
  Epoch epoch;
  std::uint32_t decode_steps = 0;  ///< How often `reads` are read, like attention would.
  std::vector<SeededItem> fills;
  std::vector<StepBlock> reads;
  std::vector<SeededItem> verifies;
  /// With a ticket the fills go layer by layer and say so, for a store.
  std::optional<LayerTicket> computes;
  /// With a ticket the verifies go layer by layer, each as soon as a load has brought its layer.
  std::optional<LayerTicket> awaits;
  /// Of those layers, only so many are verified; 0: all.
  std::uint32_t layers = 0;
  bool recorded = false;  ///< What goes layer by layer is recorded first, and launched as a whole.
  std::chrono::milliseconds patience{10'000};  ///< With a load that does not come.
  template <typename V> void visit(V& v) {
    v(session, epoch, decode_steps, fills, reads, verifies, computes, awaits, layers, recorded,
      patience);
  }
};
struct StepReply {                        ///< Sent after the work was observed complete.
  std::vector<std::uint64_t> mismatches;  ///< Words per verified block.
  std::uint64_t checksum = 0;
  template <typename V> void visit(V& v) { v(mismatches, checksum); }
};

// ---- mover -> worker's staging agent (SEQPACKET) ----

}  // namespace kvferry::ipc
