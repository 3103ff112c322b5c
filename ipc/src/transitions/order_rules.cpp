// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "transitions/order_rules.hpp"

#include <fmt/format.h>

#include <optional>
#include <string>

namespace kvferry::ipc {

using relation::Machine;
using relation::Walk;

OrderRules::OrderRules(const TransitionTrace& trace,
                       std::set<const relation::Move*>* taken,
                       const LeaseRules& leases,
                       LeaseRules::Breach breach)
    : trace_(trace), taken_(taken), leases_(leases), breach_(std::move(breach)) {
  for (std::size_t i = 0; i < trace.writers.size(); ++i) {
    writer_of_.emplace(trace.writers[i].who.incarnation.low(), i);
  }
}

void OrderRules::take(const TransitionRecord& record) {
  const auto machine = relation::machine_of(record.transition);
  if (machine == Machine::kRegistration || machine == Machine::kOrder) follow(*machine, record);
  const auto compare = [&](std::string_view rule, std::string against) {
    if (!against.empty()) breach_(rule, std::move(against));
  };
  const std::pair operation{record.writer, record.lease};
  switch (record.transition) {
    case Transition::kManagerRegister: ++known_[{record.writer, record.peer}]; return;
    case Transition::kPeerRegistered: return check_known(record);
    case Transition::kManagerClear:
    case Transition::kManagerReinit:
      undone_[operation].insert_or_assign(record.peer, record.detail != 0);
      told_at_[{record.writer, record.peer}] = record.time;
      return;
    case Transition::kManagerSeesCleared:
      undone_[operation].erase(record.peer);
      return compare("ClearedAsPublished", leases_.against_cleared(record));
    case Transition::kManagerSeesReady:
      undone_[operation].erase(record.peer);
      return compare("ReadyAsPublished",
                     leases_.against_ready(record, told_at_[{record.writer, record.peer}]));
    case Transition::kManagerGivesUp:
      // Whoever all depends on stays: without it nothing is done.
      std::erase_if(undone_[operation], [&record](const auto& told) {
        return told.first == record.peer && !told.second;
      });
      return;
    case Transition::kManagerTellsCleared: return check_all_done("AllClearedMeansEvery", record);
    case Transition::kManagerTellsReady: return check_all_done("AllReadyMeansEvery", record);
    default: return;
  }
}

void OrderRules::follow(Machine machine, const TransitionRecord& record) {
  const Walk start(trace_.writers[record.writer].lost > 0
                       ? std::nullopt
                       : std::optional(relation::first_state(machine)));
  const bool is_order = machine == Machine::kOrder;
  Walk& walk = is_order ? orders_.try_emplace({record.writer, record.peer}, start).first->second
                        : registrations_.try_emplace(record.writer, start).first->second;
  const std::string_view from = walk.state_name();
  if (walk.take(record.transition, taken_)) return;
  breach_(is_order ? "OrderRelation" : "RegistrationRelation",
          fmt::format("{} in state {}", to_string(record.transition), from));
}

void OrderRules::check_all_done(std::string_view rule, const TransitionRecord& record) {
  for (const auto& [peer, needed] : undone_[{record.writer, record.lease}]) {
    breach_(rule, fmt::format("{:016x} has not done what it was told{}", peer,
                              needed ? "" : ", and has not been given up"));
  }
}

void OrderRules::check_known(const TransitionRecord& record) {
  const auto manager = writer_of_.find(record.peer);
  if (manager == writer_of_.end() || trace_.writers[manager->second].lost > 0) return;
  const std::uint64_t self = trace_.writers[record.writer].who.incarnation.low();
  const Pair pair{manager->second, self};
  if (++told_[pair] > known_[pair]) {
    breach_("RegisteredMeansKnown",
            fmt::format("the manager has registered it {} times", known_[pair]));
  }
}

}  // namespace kvferry::ipc
