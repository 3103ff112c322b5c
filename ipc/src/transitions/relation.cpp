// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "transitions/relation.hpp"

#include <algorithm>
#include <array>

namespace kvferry::ipc::relation {
namespace {

constexpr auto kStateNames = std::to_array<std::string_view>({
#define KVFERRY_STATE(machine, name) #name,
#include "transitions/relation.inc"
});

constexpr auto kMachineOfState = std::to_array<Machine>({
#define KVFERRY_STATE(machine, name) Machine::k##machine,
#include "transitions/relation.inc"
});

constexpr auto kMachineNames = std::to_array<std::string_view>(
    {"Hello", "Owner", "Lease", "Attacher", "Registration", "Order", "EngineJob", "Job", "Part",
     "MoverJob", "Copy", "HandOver", "Launch"});

constexpr auto kMoves = std::to_array<Move>({
#define KVFERRY_MOVE(machine, from, transition, to) \
  {Machine::k##machine, State::k##machine##from, Transition::k##transition, State::k##machine##to},
#include "transitions/relation.inc"
});

constexpr auto kMoveNames = std::to_array<std::string_view>({
#define KVFERRY_MOVE(machine, from, transition, to) #machine " " #from " " #transition " " #to,
#include "transitions/relation.inc"
});

// Where a transition leads, when it leads to one state only.
std::optional<State> only_target(Transition transition) noexcept {
  std::optional<State> target;
  for (const Move& move : kMoves) {
    if (move.transition != transition) continue;
    if (target && *target != move.to) return std::nullopt;
    target = move.to;
  }
  return target;
}

}  // namespace

std::span<const Move> moves() noexcept { return kMoves; }

std::string describe(const Move& move) {
  return std::string(kMoveNames.at(static_cast<std::size_t>(&move - kMoves.data())));
}

std::string_view to_string(State state) noexcept {
  return kStateNames.at(static_cast<std::size_t>(state));
}

std::string_view to_string(Machine machine) noexcept {
  return kMachineNames.at(static_cast<std::size_t>(machine));
}

State first_state(Machine machine) noexcept {
  const auto* found = std::find(kMachineOfState.begin(), kMachineOfState.end(), machine);
  return static_cast<State>(found - kMachineOfState.begin());
}

std::optional<Machine> machine_of(Transition transition) noexcept {
  const auto* found = std::find_if(kMoves.begin(), kMoves.end(), [transition](const Move& move) {
    return move.transition == transition;
  });
  if (found == kMoves.end()) return std::nullopt;
  return found->machine;
}

std::string_view Walk::state_name() const noexcept {
  return state_ ? to_string(*state_) : std::string_view("unknown");
}

bool Walk::take(Transition transition, std::set<const Move*>* taken) {
  const auto* found = std::find_if(kMoves.begin(), kMoves.end(), [&](const Move& move) {
    return move.transition == transition && state_ == move.from;
  });
  if (found != kMoves.end()) {
    state_ = found->to;
    if (taken != nullptr) taken->insert(found);
    return true;
  }
  const bool allowed = !state_.has_value();
  state_ = only_target(transition);
  return allowed;
}

}  // namespace kvferry::ipc::relation
