// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "transitions/relation.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry::ipc {

/// The rules that the handshake's steps are held to, of owners and attachers: memory is freed when
/// nobody who lives maps it, an epoch is told as cleared when it is. And each step is a move of the
/// relation. Also knows whose deaths have been proven up to here.
/// @lifetime the trace and taken outlive it.
class LeaseRules {
 public:
  using Breach = std::function<void(std::string_view rule, std::string what)>;

  /// taken, if given, gets the moves.
  LeaseRules(const TransitionTrace& trace, std::set<const relation::Move*>* taken, Breach breach);

  /// Of any process; what is of no consequence to these rules is passed over.
  void take(const TransitionRecord& record);

  [[nodiscard]] bool is_dead(std::size_t writer) const;
  /// Whether a process may touch the record's epoch: it owns it or has it open, and has not said
  /// that its work on it is over.
  [[nodiscard]] bool may_use(std::size_t writer, const TransitionRecord& record) const;

  /// What the record's peer itself has recorded against what the manager took it to have done, to
  /// have cleared an epoch or, when told to, to have it; empty: nothing, or its records are lost.
  [[nodiscard]] std::string against_cleared(const TransitionRecord& record) const;
  [[nodiscard]] std::string against_ready(const TransitionRecord& record,
                                          std::chrono::nanoseconds told) const;

 private:
  struct Lease {
    Epoch epoch;
    std::uint64_t holder = 0;
    bool ended = false;
  };
  /// One owner's life, as its records tell it.
  struct Owner {
    std::size_t writer = 0;
    relation::Walk walk{relation::State::kOwnerIdle};
    LeasePhase phase = LeasePhase::kVacant;
    Epoch epoch;
    LeaseId last_lease;
    std::map<std::uint64_t, Lease> leases;
    std::map<std::uint64_t, relation::Walk> lease_walks;
    Epoch allocated;                  ///< The latest one.
    std::set<std::uint64_t> drained;  ///< Epochs.
    std::set<std::uint64_t> freed;
    std::set<std::uint64_t> kept;
    std::map<std::uint64_t, bool> told_quarantined;  ///< By epoch that was cleared.
  };
  /// One attacher under one session.
  struct Attacher {
    relation::Walk walk{relation::State::kAttacherIdle};
    Epoch epoch;
    LeaseId lease;
    Epoch mapped;                       ///< The latest one,
    std::chrono::nanoseconds closed{};  ///< and when it was closed.
    std::set<std::uint64_t> released;
  };

  [[nodiscard]] bool is_partial(std::size_t writer) const;
  [[nodiscard]] bool is_worker(std::uint64_t incarnation) const;
  [[nodiscard]] relation::Walk start_at(relation::State state, std::size_t writer) const;
  [[nodiscard]] std::uint64_t incarnation_of(std::size_t writer) const;
  /// The writer with this incarnation, if all that it recorded is here.
  [[nodiscard]] std::optional<std::size_t> whole_writer(std::uint64_t incarnation) const;
  [[nodiscard]] const Owner* owner_in(std::uint64_t session, std::size_t writer) const;

  void check_alive(const TransitionRecord& record);
  Owner& owner_of(const TransitionRecord& record);
  void owner_transition(const TransitionRecord& record);
  /// The two machines of relation.inc that an owner's records move.
  void follow(Owner& owner, const TransitionRecord& record);
  void move(Owner& owner, const TransitionRecord& record, LeasePhase to);
  void record_lease(Owner& owner, const TransitionRecord& record);
  void granted(const Owner& owner, const TransitionRecord& record);
  void sees_release(Owner& owner, const TransitionRecord& record);
  void sees_death(Owner& owner, const TransitionRecord& record);
  void check_all_ended(const Owner& owner, Epoch epoch, std::string_view rule);
  /// Whatever the owner believes: nobody who lives may have it open.
  void check_nobody_maps(const Owner& owner, const TransitionRecord& record);
  void free(Owner& owner, const TransitionRecord& record);
  void reap(Owner& owner, const TransitionRecord& record);
  void cleared(Owner& owner, const TransitionRecord& record);
  void quarantined(Owner& owner, const TransitionRecord& record);

  void attacher_transition(const TransitionRecord& record);
  /// A process that owns an arena does more than that, which is over as well.
  void owner_died(std::uint64_t session);
  /// Who asks has let go of all that it had, here and under owners before.
  void check_holds_nothing(const TransitionRecord& record, const Attacher& attacher);
  void check_granted(const TransitionRecord& record);

  const TransitionTrace& trace_;
  std::set<const relation::Move*>* taken_;
  Breach breach_;
  std::map<std::uint64_t, std::size_t> writer_of_;                       ///< By incarnation.
  std::map<std::uint64_t, Owner> owners_;                                ///< By session.
  std::map<std::pair<std::size_t, std::uint64_t>, Attacher> attachers_;  ///< By writer, session.
  std::set<std::uint64_t> dead_;                                         ///< Incarnations.
};

}  // namespace kvferry::ipc
