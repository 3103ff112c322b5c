// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "kvferry/ipc/lease/arena_source.hpp"
#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/os/home_process.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// The unlink handshake of docs/handshake.md, role-symmetric: whoever allocates is the owner.
namespace kvferry::ipc {

inline constexpr std::uint32_t kLeaseProtocolVersion = 2;

/// Exit status of a mover that could not drain its device work in time: its death is the
/// acknowledgement.
inline constexpr int kCannotDrainExit = 70;

enum class CacheOwner : std::uint8_t { kWorker = 1, kMover = 2 };
enum class ProcessKind : std::uint8_t { kWorker = 1, kMover, kEngine, kOperator, kManager };
[[nodiscard]] std::string_view to_string(CacheOwner owner) noexcept;
[[nodiscard]] std::string_view to_string(ProcessKind kind) noexcept;

/// Phase of the owner word (epoch << 8 | phase): one indivisible 64-bit value, one writer.
enum class LeasePhase : std::uint8_t {
  kVacant = 0,
  kReady = 1,
  kRevoking = 2,
  kCleared = 3,
  kQuarantined = 4,
  kShutdown = 5
};
[[nodiscard]] std::string_view to_string(LeasePhase phase) noexcept;
/// The transition relation of the owner word; epochs are compared by the caller.
[[nodiscard]] constexpr bool can_move(LeasePhase from, LeasePhase to) noexcept {
  switch (from) {
    case LeasePhase::kVacant: return to == LeasePhase::kReady || to == LeasePhase::kShutdown;
    case LeasePhase::kReady: return to == LeasePhase::kRevoking;
    case LeasePhase::kRevoking: return to == LeasePhase::kCleared || to == LeasePhase::kQuarantined;
    case LeasePhase::kCleared:
    case LeasePhase::kQuarantined: return to == LeasePhase::kReady || to == LeasePhase::kShutdown;
    case LeasePhase::kShutdown: return false;
  }
  return false;
}

/// What both sides compare at hello, before anything is allocated or awaited.
struct LeaseIdentity {
  std::string instance;
  std::string engine;
  Rank rank;
  std::uint32_t ranks = 1;
  ProcessKind self = ProcessKind::kWorker;
  CacheOwner cache_owner = CacheOwner::kWorker;
  HandleKind handles = HandleKind::kVmm;
  Digest fingerprint;
  IncarnationId incarnation;

  [[nodiscard]] bool is_owner() const noexcept {
    return (self == ProcessKind::kWorker) == (cache_owner == CacheOwner::kWorker);
  }
};

struct LeaseTimeouts {
  std::chrono::milliseconds hello{5000};
  std::chrono::milliseconds drain{3000};   ///< Either side: its own user's quiesce().
  std::chrono::milliseconds revoke{5000};  ///< Owner: Revoking published until all leases ended.
  std::chrono::milliseconds kill{2000};    ///< Owner: SIGKILL of a mover until its death is proven.
  std::chrono::milliseconds kill_per_pinned_gib{50};  ///< Added to kill, per GiB it holds.
  std::chrono::milliseconds settle{1000};             ///< Memory back at the driver after a death.
};

struct LeaseOptions {
  LeaseIdentity identity;
  LeaseTimeouts timeouts;
  bool stable_addresses = true;    ///< VMM: map each epoch at the same addresses.
  TransitionLog transitions = {};  ///< Where this side's are recorded.
};

/// A consistent picture for status and for the manager.
struct LeaseView {
  std::uint64_t number = 0;  ///< Grows with every change: of two views the later one has more.
  SessionId session;         ///< Zero: attacher without an owner.
  Epoch epoch;               ///< Last epoch seen or made.
  LeasePhase phase = LeasePhase::kVacant;
  bool mapped = false;  ///< This process has the epoch mapped and its user accepted it.
  /// Lease under which the epoch's memory was zeroed. 0: by its owner (a worker that owns), or not
  /// yet, or not mapped here. Equal session, epoch and prepared_by: the contents have lived on.
  LeaseId prepared_by;
  std::vector<std::uint32_t> group_blocks;   ///< Of the mapped arena.
  std::vector<IncarnationId> lease_holders;  ///< Owner: of leases not ended, over all epochs.
  std::uint64_t quarantined_bytes = 0;
  /// Attacher: refused at hello for a reason that no retry can mend (role, geometry, ranks,
  /// handles, version); it has stopped trying, and the process should end.
  std::optional<Error> refused;
  /// Owner: why the last peer was turned away at hello. The owner itself serves on.
  std::optional<Error> peer_refused;
  std::string note;  ///< Last error or wait, in words.
};

enum class ClearKind : std::uint8_t { kCleared = 1, kClearedPeerDead, kQuarantined };
[[nodiscard]] std::string_view to_string(ClearKind kind) noexcept;

struct ClearOutcome {
  ClearKind kind = ClearKind::kCleared;
  Epoch epoch;
  std::string detail;  ///< Names the peer, the bytes and the remedy when not kCleared.
  std::uint64_t quarantined_bytes = 0;
  MemoryInfo before;  ///< Driver's view at the start.
  MemoryInfo after;   ///< Driver's view at the end.
  std::chrono::microseconds took{};
};

using LeaseChanged = std::function<void(const LeaseView&)>;

/// The owner's side for one rank: listens, grants, revokes, frees. One internal thread does grants
/// and clears; calls from other threads are handed to it.
/// @threading any. @lifetime device, user and source outlive it; the destructor shuts down (a
/// bounded clear). In a child that the process forks: nothing may be called, the destructor does
/// nothing.
class LeaseOwner {
 public:
  /// source: whose memory the regions are; null: allocated here. Throws Exception: the name is
  /// owned by a living process, no room, no permission; kInvalidArgument for a mover with a source.
  LeaseOwner(LeaseOptions options,
             const RuntimeDir& dir,
             Device& device,
             ArenaUser& user,
             LeaseChanged on_change,
             ArenaSource* source = nullptr);
  LeaseOwner(const LeaseOwner&) = delete;
  LeaseOwner& operator=(const LeaseOwner&) = delete;
  ~LeaseOwner();

  /// Allocates (or borrows) the next epoch as the layout plans it, lets the user prepare it,
  /// exports and publishes Ready. kBusy while mapped or while a clear runs; kNoDeviceMemory
  /// (kQuarantined when quarantine is the reason).
  [[nodiscard]] Result<Epoch> init(const ArenaLayout& layout, Deadline deadline);
  /// Ends the epoch: quiesce, Revoking, wait, free, Cleared. The same outcome again when that epoch
  /// is already cleared, and of a clear of it that runs already; kStaleEpoch for one that never
  /// was. The deadline is the caller's alone: kTimeout when it passes first, while the clear goes
  /// on within its own time-outs and its outcome can be asked for again.
  [[nodiscard]] Result<ClearOutcome> clear(Epoch epoch, Deadline deadline);
  [[nodiscard]] LeaseView view() const;

 private:
  class Impl;
  HomeProcess home_;
  std::unique_ptr<Impl> impl_;
};

/// The attacher's side for one rank: connects, attaches, maps, lets go, for ever. One internal
/// thread; it never waits for the owner while it maps anything.
/// @threading any. @lifetime device, geometry and user outlive it; the destructor detaches. In a
/// forked child as an owner.
class LeaseAttacher {
 public:
  LeaseAttacher(LeaseOptions options,
                const RuntimeDir& dir,
                Device& device,
                const Geometry& geometry,
                ArenaUser& user,
                LeaseChanged on_change);
  LeaseAttacher(const LeaseAttacher&) = delete;
  LeaseAttacher& operator=(const LeaseAttacher&) = delete;
  ~LeaseAttacher();

  /// Let go of the epoch now, without being asked by the owner; ok when not mapped. A mover that
  /// cannot drain within `drain` exits (its death is the acknowledgement); a worker reports
  /// kTimeout and stays mapped. The deadline is the caller's alone: kTimeout when it passes first,
  /// while the detach goes on.
  [[nodiscard]] Result<ClearOutcome> detach(Epoch epoch, Deadline deadline);
  /// Ok once the epoch (or a later one) is mapped; wakes on death, revoke and the deadline. Epochs
  /// count from 1 in each session: with one named in `of`, only its epochs will do. The end of its
  /// owner is kPeerDied then and a revoke of the epoch kRevoked, also when they came before the
  /// wait.
  [[nodiscard]] Status wait_mapped(Epoch at_least, Deadline deadline, const SessionId& of = {});
  /// Ends every wait_mapped(), those to come as well, with kCancelled: this process ends.
  void cancel_waits() noexcept;
  [[nodiscard]] LeaseView view() const;

 private:
  class Impl;
  HomeProcess home_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::ipc
