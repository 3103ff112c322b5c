// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_trace.hpp"

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// The transition relation of the handshake (relation.inc), and walks through it.
namespace kvferry::ipc::relation {

enum class Machine : std::uint8_t {
  kHello,
  kOwner,
  kLease,
  kAttacher,
  kRegistration,
  kOrder,
  kEngineJob,
  kJob,
  kPart,
  kMoverJob,
  kCopy,
  kHandOver,
  kLaunch
};

/// States of all machines, those of one together and in the order of relation.inc.
enum class State : std::uint8_t {
#define KVFERRY_STATE(machine, name) k##machine##name,
#include "transitions/relation.inc"
};

struct Move {
  Machine machine;
  State from;
  Transition transition;
  State to;
};

[[nodiscard]] std::span<const Move> moves() noexcept;
/// "Attacher Idle AttacherAsk Asked", as in relation.inc.
[[nodiscard]] std::string describe(const Move& move);
[[nodiscard]] std::string_view to_string(State state) noexcept;
/// Where all of its kind start.
[[nodiscard]] State first_state(Machine machine) noexcept;

[[nodiscard]] std::string_view to_string(Machine machine) noexcept;

/// The machine whose moves are made by this transition, if any. OwnerSeesDeath without a lease is
/// no move.
[[nodiscard]] std::optional<Machine> machine_of(Transition transition) noexcept;

/// One machine on its way.
class Walk {
 public:
  /// No state: what came before is lost, so it comes from wherever its first transition is allowed.
  explicit Walk(std::optional<State> state) noexcept : state_(state) {}

  [[nodiscard]] std::optional<State> state() const noexcept { return state_; }
  [[nodiscard]] std::string_view state_name() const noexcept;
  /// False: not allowed here. The walk then goes on from where the transition leads elsewhere.
  /// taken, if given, gets the move.
  [[nodiscard]] bool take(Transition transition, std::set<const Move*>* taken);

 private:
  std::optional<State> state_;
};

/// check_transitions(), and which moves the trace has.
[[nodiscard]] std::vector<TransitionBreach> check(const TransitionTrace& trace,
                                                  std::set<const Move*>& taken);

}  // namespace kvferry::ipc::relation
