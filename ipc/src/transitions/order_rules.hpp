// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/transitions/transition_trace.hpp"
#include "transitions/lease_rules.hpp"
#include "transitions/relation.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string_view>
#include <utility>

namespace kvferry::ipc {

/// The rules that registrations and a manager's orders to clear and to make an epoch are held to:
/// what the manager takes as done is compared with what the process that did it recorded. And each
/// step is a move of the relation. @lifetime the trace, leases and taken outlive it.
class OrderRules {
 public:
  /// taken, if given, gets the moves. leases has taken the record before this does.
  OrderRules(const TransitionTrace& trace,
             std::set<const relation::Move*>* taken,
             const LeaseRules& leases,
             LeaseRules::Breach breach);

  /// Of any process; what is of no consequence to these rules is passed over.
  void take(const TransitionRecord& record);

 private:
  using Pair = std::pair<std::size_t, std::uint64_t>;  ///< A writer, and an incarnation.

  void follow(relation::Machine machine, const TransitionRecord& record);
  void check_known(const TransitionRecord& record);
  void check_all_done(std::string_view rule, const TransitionRecord& record);

  const TransitionTrace& trace_;
  std::set<const relation::Move*>* taken_;
  const LeaseRules& leases_;
  LeaseRules::Breach breach_;
  std::map<std::uint64_t, std::size_t> writer_of_;    ///< By incarnation.
  std::map<Pair, relation::Walk> orders_;             ///< By manager and whom it told.
  std::map<Pair, std::chrono::nanoseconds> told_at_;  ///< When a manager last told whom.
  /// Of a manager's clear or re-init: who was told and has not done it, as far as is known, and
  /// whether all depends on that one.
  std::map<std::pair<std::size_t, LeaseId>, std::map<std::uint64_t, bool>> undone_;
  std::map<std::size_t, relation::Walk> registrations_;
  std::map<Pair, std::uint64_t> known_;  ///< How often a manager registered whom,
  std::map<Pair, std::uint64_t> told_;   ///< and how often that one says it was.
};

}  // namespace kvferry::ipc
