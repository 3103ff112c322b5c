// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "transitions/lease_rules.hpp"
#include "transitions/relation.hpp"

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

namespace kvferry::ipc {

/// The rules that hellos are held to: a rank has one owner at a time, who is welcome fits and who
/// is refused does not, and nothing is allocated or asked for before. And each step is a move of
/// the relation. @lifetime the trace and taken outlive it.
class HelloRules {
 public:
  /// taken, if given, gets the moves.
  HelloRules(const TransitionTrace& trace,
             std::set<const relation::Move*>* taken,
             LeaseRules::Breach breach);

  /// Of any process; what is of no consequence to these rules is passed over.
  void take(const TransitionRecord& record);

 private:
  /// Somebody who says hello.
  struct Greeter {
    relation::Walk walk;
    std::optional<std::uint64_t> compares = {};  ///< What it said.
    std::uint64_t session = 0;                   ///< Whose welcome came last.
  };
  struct Listener {
    std::size_t writer = 0;
    std::optional<std::uint64_t> compares = {};
  };
  using RankName = std::pair<std::string_view, std::uint32_t>;  ///< Of an engine.
  using Pair = std::pair<std::uint64_t, std::uint64_t>;         ///< A session, and an incarnation.

  [[nodiscard]] bool is_partial(std::size_t writer) const;
  [[nodiscard]] RankName rank_of(std::size_t writer) const;
  [[nodiscard]] std::uint64_t incarnation_of(std::size_t writer) const;
  Greeter& greeter(std::size_t writer);
  /// What the process with this incarnation said, as far as it is known.
  [[nodiscard]] std::optional<std::uint64_t> said_by(std::uint64_t incarnation) const;
  void follow(const TransitionRecord& record);
  void check_alike(const TransitionRecord& record) const;
  void check_different(const TransitionRecord& record) const;
  void check_welcomed(const TransitionRecord& record);
  void check_asks(const TransitionRecord& record);
  void take_over_unseen(const TransitionRecord& record);
  void check_one_owner(const TransitionRecord& record) const;

  const TransitionTrace& trace_;
  std::set<const relation::Move*>* taken_;
  LeaseRules::Breach breach_;
  std::map<std::uint64_t, std::size_t> writer_of_;  ///< By incarnation.
  std::map<std::size_t, Greeter> greeters_;
  std::map<std::uint64_t, Listener> owners_;    ///< By session.
  std::map<RankName, std::uint64_t> latest_;    ///< The session that listens.
  std::map<std::size_t, std::uint64_t> meets_;  ///< What who waits for others compares.
  std::map<Pair, std::uint64_t> welcomes_;      ///< How often whom was welcomed in a session,
  std::map<Pair, std::uint64_t> welcomed_;      ///< and how often that one says it was.
};

}  // namespace kvferry::ipc
