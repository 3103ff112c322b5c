// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/rank/emptied_cache.hpp"
#include "kvferry/ipc/rank/memory_user.hpp"
#include "kvferry/ipc/rank/weights_user.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// Messages of pause, continue and flush; see docs/lifecycle.md. Part of what kWireVersion counts.
namespace kvferry::ipc {

// ---- operator (and engine) -> manager ----

/// What an engine's schedulers have to do, over all of them. What holds device blocks keeps an
/// engine from being idle.
struct SchedulerLoad {
  std::uint64_t running = 0;    ///< Requests that hold blocks and go on.
  std::uint64_t frozen = 0;     ///< Requests that hold blocks and were stopped by a pause in place.
  std::uint64_t waiting = 0;    ///< Requests that hold no block: new ones and retracted ones.
  std::uint64_t transfers = 0;  ///< Jobs without a completion that was taken.
  template <typename V> void visit(V& v) { v(running, frozen, waiting, transfers); }
  [[nodiscard]] bool is_idle() const noexcept {
    return running == 0 && frozen == 0 && transfers == 0;
  }
};

struct PauseRequest {
  std::string engine;  ///< Empty: the only one.
  PauseMode mode = PauseMode::kRetract;
  std::chrono::milliseconds deadline{15000};
  template <typename V> void visit(V& v) { v(engine, mode, deadline); }
};
struct PauseReply {
  std::uint32_t schedulers = 0;
  SchedulerLoad load;
  std::chrono::microseconds took{};
  template <typename V> void visit(V& v) { v(schedulers, load, took); }
};

struct ContinueRequest {
  std::string engine;  ///< Empty: the only one.
  bool empty_cache = true;
  std::chrono::milliseconds deadline{15000};
  template <typename V> void visit(V& v) { v(engine, empty_cache, deadline); }
};
/// The caching allocator of one rank's worker around an emptying.
struct AllocatorMemory {
  std::uint64_t reserved_before = 0;  ///< Taken from the driver.
  std::uint64_t reserved_after = 0;
  std::uint64_t used_after = 0;      ///< Of that, lent out.
  std::uint64_t free_on_device = 0;  ///< The driver's view afterwards.
  template <typename V> void visit(V& v) {
    v(reserved_before, reserved_after, used_after, free_on_device);
  }
};
struct RankMemory {
  Rank rank;
  AllocatorMemory memory;
  bool absent = false;         ///< It has no worker, and so no cache.
  std::optional<Error> error;  ///< Why the rank was not emptied.
  template <typename V> void visit(V& v) { v(rank, memory, absent, error); }
};
struct ContinueReply {            ///< The envelope's error names the first failing rank.
  std::vector<RankMemory> ranks;  ///< Empty without empty_cache.
  std::chrono::microseconds took{};
  template <typename V> void visit(V& v) { v(ranks, took); }
};

struct FlushRequest {
  std::string engine;  ///< Empty: the only one.
  bool empty_cache = true;
  HostPolicy host = HostPolicy::kDrop;
  std::chrono::milliseconds timeout{0};       ///< How long to wait until the engine is idle.
  std::chrono::milliseconds deadline{15000};  ///< For all that comes after.
  template <typename V> void visit(V& v) { v(engine, empty_cache, host, timeout, deadline); }
};
struct FlushReply {               ///< The envelope's error names the first failing rank.
  std::vector<RankMemory> ranks;  ///< Empty without empty_cache.
  std::uint64_t host_blocks_dropped = 0;
  std::chrono::microseconds took{};
  template <typename V> void visit(V& v) { v(ranks, host_blocks_dropped, took); }
};

struct UpdateWeightsRequest {
  std::string engine;  ///< Empty: the only one.
  WeightsSource source;
  bool flush_cache = true;
  bool empty_cache = false;
  std::optional<Digest>
      weights;  ///< Their identity; fresh random bytes unless the caller names it.
  std::chrono::milliseconds timeout{0};       ///< How long to wait until the engine is idle.
  std::chrono::milliseconds deadline{60000};  ///< For what is prepared after that.
  template <typename V> void visit(V& v) {
    v(engine, source, flush_cache, empty_cache, weights, timeout, deadline);
  }
};
/// A piece of the image that an update with WeightsFrom::kTensors is to be prepared from: a whole
/// safetensors file, piece by piece, in order, each answered when every rank has it. Also manager
/// -> worker, without the engine's name. Who sends it keeps its connection until the update.
struct WeightsPart {
  static constexpr std::size_t kMaxBytes = std::size_t{8} << 20;
  std::string engine;  ///< Empty: the only one.
  /// Names the image: the update's WeightsSource::location is its hex. A new one takes the place of
  /// one that was not updated to.
  Digest upload;
  std::uint64_t offset = 0;
  std::uint64_t total_bytes = 0;  ///< Of the image; zero: no more comes, forget it.
  Bytes bytes;
  template <typename V> void visit(V& v) { v(engine, upload, offset, total_bytes, bytes); }
};
struct RankUpdate {
  Rank rank;
  Digest weights;           ///< In use now.
  std::uint64_t bytes = 0;  ///< Of this rank's part.
  std::optional<Error> error;
  template <typename V> void visit(V& v) { v(rank, weights, bytes, error); }
};
struct UpdateWeightsReply {  ///< The envelope's error names the first failing rank.
  Digest weights;            ///< The engine's identity now.
  std::vector<RankUpdate> updates;
  std::vector<RankMemory> ranks;  ///< Empty without empty_cache.
  std::chrono::microseconds took{};
  /// Of WeightsFrom::kDistributed, what rank 0 handed them on by: "nccl 2.28.9", "messages".
  std::string transport{};
  template <typename V> void visit(V& v) { v(weights, updates, ranks, took, transport); }
};

/// Engine and operator: give device memory back to the driver until a resume.
struct ReleaseRequest {
  std::string engine;  ///< Empty: the only one.
  MemoryTags tags;     ///< Empty: all.
  WeightsBackup backup = WeightsBackup::kHost;
  HostPolicy host = HostPolicy::kDrop;        ///< With kKvCache.
  std::chrono::milliseconds timeout{0};       ///< How long to wait until the engine is idle.
  std::chrono::milliseconds deadline{60000};  ///< For all that comes after.
  template <typename V> void visit(V& v) { v(engine, tags, backup, host, timeout, deadline); }
};
/// What a rank's worker gave up or took back, beside the cache.
struct RankReleaseReply {
  MemoryTags released;              ///< Now, without the cache.
  std::uint64_t weights_bytes = 0;  ///< Given up, or taken back, by this command.
  std::uint64_t scratch_bytes = 0;
  std::uint64_t free_before = 0;  ///< On the device, in the driver's view.
  AllocatorMemory memory;         ///< reserved and used: where it was emptied.
  template <typename V> void visit(V& v) {
    v(released, weights_bytes, scratch_bytes, free_before, memory);
  }
};
struct RankReleased {
  Rank rank;
  RankReleaseReply outcome;
  std::optional<Error> error;
  template <typename V> void visit(V& v) { v(rank, outcome, error); }
};
struct ReleaseReply {                ///< The envelope's error names the first failing rank.
  MemoryTags released;               ///< Of the engine, now.
  std::vector<RankReleased> ranks;   ///< Empty when the cache alone was asked for.
  std::vector<RankOutcome> cleared;  ///< Empty without kKvCache.
  std::uint64_t host_blocks_dropped = 0;
  std::chrono::microseconds took{};
  template <typename V> void visit(V& v) { v(released, ranks, cleared, host_blocks_dropped, took); }
};

struct ResumeRequest {
  std::string engine;  ///< Empty: the only one.
  MemoryTags tags;     ///< Empty: all that are released.
  std::chrono::milliseconds deadline{60000};
  template <typename V> void visit(V& v) { v(engine, tags, deadline); }
};
struct ResumeReply {                ///< The envelope's error names the first failing rank.
  MemoryTags resumed;               ///< As asked for.
  MemoryTags released;              ///< Of the engine, still.
  bool weights_lost = false;        ///< Released without a backup: update them.
  std::vector<RankReleased> ranks;  ///< Empty when the cache alone was asked for.
  std::uint64_t generation = 0;
  std::optional<PauseMode> paused;  ///< In force now.
  std::chrono::microseconds took{};
  template <typename V> void visit(V& v) {
    v(resumed, released, weights_lost, ranks, generation, paused, took);
  }
};

// ---- manager -> engine, answered ----

/// What a scheduler is told to do from now on.
enum class ScheduleOrder : std::uint8_t {
  kRun = 1,
  kAbort,    ///< End every request; start none.
  kRetract,  ///< Take the blocks of running requests back and put them into the queue; start none.
  kInPlace,  ///< Stop with blocks as they are; start none.
  kFlush,    ///< When idle: start none and forget what every block holds.
  kIdle      ///< When idle: start none.
};
constexpr std::uint64_t wire_max(ScheduleOrder) {
  return static_cast<std::uint64_t>(ScheduleOrder::kIdle);
}
/// Answered with a SchedulerLoad when it is in effect. A later order takes the place of one that is
/// not in effect yet: that ends with kCancelled, or with kNotIdle and nothing changed.
struct Schedule {
  ScheduleOrder order = ScheduleOrder::kRun;
  bool wait = true;          ///< Of kFlush and kIdle: waits until it is idle; else it ends at once.
  bool for_release = false;  ///< Of a pause: a release made it. Told the next manager.
  template <typename V> void visit(V& v) { v(order, wait, for_release); }
};

// ---- manager -> worker, answered with an AllocatorMemory ----

struct RankEmpty {  ///< Empty the caching allocator of everything but the arena's memory.
  EmptyReason reason = EmptyReason::kContinue;
  template <typename V> void visit(V& v) { v(reason); }
};

// ---- manager -> worker, answered with a RankWeightsReply ----

enum class WeightsPhase : std::uint8_t { kPrepare = 1, kCommit, kAbandon };
constexpr std::uint64_t wire_max(WeightsPhase) {
  return static_cast<std::uint64_t>(WeightsPhase::kAbandon);
}
struct RankWeights {
  WeightsPhase phase = WeightsPhase::kPrepare;
  std::uint64_t update = 0;  ///< What is committed has to be what was prepared under this number.
  WeightsSource source;      ///< To prepare from.
  Digest weights;            ///< To commit: the identity that the weights have from then on.
  std::chrono::milliseconds deadline{60000};
  BroadcastId broadcast{};  ///< The source is what rank 0 broadcasts in that group; empty: is not.
  template <typename V> void visit(V& v) { v(phase, update, source, weights, deadline, broadcast); }
};
/// Of an update with WeightsFrom::kDistributed, before it is prepared; answered with a
/// RankBroadcastReply.
enum class BroadcastPhase : std::uint8_t { kLook = 1, kOpen };
constexpr std::uint64_t wire_max(BroadcastPhase) {
  return static_cast<std::uint64_t>(BroadcastPhase::kOpen);
}
struct RankBroadcast {
  BroadcastPhase phase = BroadcastPhase::kLook;
  std::string file;    ///< kOpen, which is for rank 0: what it is to broadcast.
  bool again = false;  ///< kOpen: in the group that all ranks have kept.
  template <typename V> void visit(V& v) { v(phase, file, again); }
};
struct RankBroadcastReply {
  BroadcastPort port;  ///< kLook.
  BroadcastId id;      ///< kOpen.
  template <typename V> void visit(V& v) { v(port, id); }
};
/// To rank 0, of an update with WeightsFrom::kDistributed: what the others are to get of the file,
/// answered with a WeightsPart of at most kMaxBytes. The file stays open until the update is over,
/// and rank 0 prepares from that very one.
struct RankWeightsRead {
  Digest upload;  ///< What the file is known by at the other ranks.
  std::string file;
  std::uint64_t offset = 0;
  template <typename V> void visit(V& v) { v(upload, file, offset); }
};
struct RankWeightsReply {
  Digest weights;           ///< In use now.
  std::uint64_t bytes = 0;  ///< Prepared.
  template <typename V> void visit(V& v) { v(weights, bytes); }
};

// ---- manager -> worker, answered with a RankReleaseReply ----

struct RankRelease {  ///< Of what is released already: nothing, and no error.
  MemoryTags tags;    ///< Without the cache, whose memory goes with a RankClear.
  WeightsBackup backup = WeightsBackup::kHost;
  bool empty = true;  ///< Then empty the caching allocator.
  std::chrono::milliseconds deadline{60000};
  template <typename V> void visit(V& v) { v(tags, backup, empty, deadline); }
};
struct RankResume {  ///< Of what is not released: nothing, and no error.
  MemoryTags tags;
  std::chrono::milliseconds deadline{60000};
  template <typename V> void visit(V& v) { v(tags, deadline); }
};

}  // namespace kvferry::ipc
