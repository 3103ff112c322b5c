// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "transitions/relation.hpp"

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace kvferry::ipc {

/// The machines of relation.inc that steps of jobs move: jobs and their parts, copies, hand-overs
/// and launches, each as the process that records it has it. @lifetime taken outlives it.
class JobWalks {
 public:
  struct Stray {
    std::string_view rule;
    std::string what;
  };

  /// taken, if given, gets the moves.
  explicit JobWalks(std::set<const relation::Move*>* taken) : taken_(taken) {}

  /// Moves what this record moves; why that is no move of the relation, if it is none. lost_some:
  /// what its writer recorded before may be lost.
  [[nodiscard]] std::optional<Stray> take(const TransitionRecord& record, bool lost_some);

 private:
  struct Key {
    relation::Machine machine{};
    std::size_t writer = 0;
    std::uint64_t job = 0;   ///< Launch: the connection over which it was asked for.
    std::uint64_t part = 0;  ///< Of a copy; the mover of a part; the number of a hand-over.
    friend auto operator<=>(const Key&, const Key&) = default;
  };

  [[nodiscard]] static Key key_of(relation::Machine machine, const TransitionRecord& record);
  /// Those of the writer's hand-overs that the record is about, though it names none.
  void move_hand_overs(const TransitionRecord& record);

  std::set<const relation::Move*>* taken_;
  std::map<Key, relation::Walk> walks_;
};

}  // namespace kvferry::ipc
