// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "lease/lease_words.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::ipc::lease {

/// A handle that left this process and was not proven let go.
struct Lease {
  LeaseId id;
  Epoch epoch;
};

/// One incarnation of an attacher. Ends with that process's proven death, never before.
struct Slot {
  IncarnationId incarnation;
  ProcessKind kind = ProcessKind::kMover;
  ProcessRef process;
  std::optional<PacketSocket> connection;  ///< Empty: closed, which proves nothing.
  std::optional<AttacherWordsView> words;
  std::optional<Lease> lease;   ///< Living; at most one per incarnation.
  LeaseId last_lease;           ///< Last one granted; 0 none.
  std::optional<Epoch> wanted;  ///< Parked attach request.
  bool distrusted = false;      ///< Forged a word: only its death ends its lease.
  bool killed = false;          ///< SIGKILL was sent.

  [[nodiscard]] std::string name() const;
};

/// Leases that ended by a death in one epoch: what the settle check is for.
struct Deaths {
  std::uint64_t count = 0;
  std::vector<std::string> names;  ///< The last few.
};

/// The owner's table of incarnations and their leases. Plain data: no descriptors are watched here.
/// @threading the lease thread.
class SlotTable {
 public:
  static constexpr std::size_t kMaxSlots = 64;       ///< Living attachers of one rank.
  static constexpr std::size_t kMaxPerProcess = 16;  ///< Of them, incarnations of one process.

  enum class Release : std::uint8_t { kNone, kEnded, kForged };

  [[nodiscard]] Slot* find(const IncarnationId& incarnation);
  [[nodiscard]] bool full() const noexcept { return slots_.size() >= kMaxSlots; }
  /// Slots that this life of the process has taken.
  [[nodiscard]] std::size_t count_of(const ProcessRef& process) const noexcept;
  Slot& add(const IncarnationId& incarnation, ProcessKind kind, ProcessRef process);
  /// Records the lease; the handle may leave after this. @pre no living lease in the slot.
  Lease record_lease(Slot& slot, Epoch epoch);
  /// Takes a lease back whose handle provably never left.
  static void withdraw_lease(Slot& slot) noexcept { slot.lease.reset(); }
  /// Reads the released word and ends the lease it passes. kForged, once: a word names a lease that
  /// was never granted.
  static Release collect_release(Slot& slot);
  /// The lease that the holder says it has zeroed its epoch under; 0 none, and of no weight when
  /// distrusted.
  [[nodiscard]] static LeaseId prepared(const Slot& slot) noexcept;
  /// The process is proven dead: ends its lease and removes the slot.
  void remove_dead(const IncarnationId& incarnation);

  void for_each(const std::function<void(Slot&)>& visit);
  [[nodiscard]] std::vector<Slot*> holding(Epoch epoch);
  [[nodiscard]] std::vector<IncarnationId> holders() const;
  [[nodiscard]] const Deaths* deaths(Epoch epoch) const;
  void forget_deaths(Epoch epoch) { deaths_.erase(epoch.value); }

 private:
  std::map<IncarnationId, Slot> slots_;
  std::map<std::uint64_t, Deaths> deaths_;  ///< By epoch.
  std::uint64_t last_lease_ = 0;            ///< Of the session: ids are never reused.
};

/// "mover pid 12 (lease 3), worker pid 9 (lease 4)".
[[nodiscard]] std::string describe(const std::vector<Slot*>& slots);
/// "worker pid 9, worker pid 12 and 3 before".
[[nodiscard]] std::string describe(const Deaths& deaths);

}  // namespace kvferry::ipc::lease
