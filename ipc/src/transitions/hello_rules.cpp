// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "transitions/hello_rules.hpp"

#include "kvferry/ipc/base/error.hpp"

#include <fmt/format.h>

namespace kvferry::ipc {
namespace {

using relation::Machine;
using relation::State;
using relation::Walk;

// Errors that say that two processes do not fit, and not that one cannot be admitted now.
bool says_different(std::uint64_t code) noexcept {
  return code == static_cast<std::uint64_t>(ErrorCode::kRoleConflict) ||
         code == static_cast<std::uint64_t>(ErrorCode::kGeometryMismatch) ||
         code == static_cast<std::uint64_t>(ErrorCode::kInvalidArgument);
}

bool is_an_owners(Transition transition) noexcept {
  return transition == Transition::kHelloWelcome ||
         (transition >= Transition::kOwnerAllocate && transition <= Transition::kOwnerShutdown);
}

/// The part of what is compared that attachers compare with each other.
std::uint64_t role_in(std::uint64_t compares) noexcept { return compares & kComparedRole; }

}  // namespace

HelloRules::HelloRules(const TransitionTrace& trace,
                       std::set<const relation::Move*>* taken,
                       LeaseRules::Breach breach)
    : trace_(trace), taken_(taken), breach_(std::move(breach)) {
  for (std::size_t i = 0; i < trace.writers.size(); ++i) writer_of_.emplace(incarnation_of(i), i);
}

void HelloRules::take(const TransitionRecord& record) {
  if (relation::machine_of(record.transition) == Machine::kHello) follow(record);
  if (is_an_owners(record.transition)) {
    take_over_unseen(record);
    check_one_owner(record);
  }
  switch (record.transition) {
    case Transition::kHelloListen:
      latest_[rank_of(record.writer)] = record.session;
      owners_[record.session] = {record.writer, record.detail};
      return;
    case Transition::kHelloMeet: meets_[record.writer] = record.detail; return;
    case Transition::kHelloSay: greeter(record.writer).compares = record.detail; return;
    case Transition::kHelloWelcome:
      ++welcomes_[{record.session, record.peer}];
      return check_alike(record);
    case Transition::kHelloRefuse: return check_different(record);
    case Transition::kHelloWelcomed:
      greeter(record.writer).session = record.session;
      return check_welcomed(record);
    case Transition::kAttacherAsk: return check_asks(record);
    case Transition::kOwnerAllocate:
      if (!is_partial(record.writer) && !owners_.contains(record.session)) {
        breach_("AllocatesAsListener", "it does not listen for its rank");
      }
      return;
    default: return;
  }
}

bool HelloRules::is_partial(std::size_t writer) const { return trace_.writers[writer].lost > 0; }

HelloRules::RankName HelloRules::rank_of(std::size_t writer) const {
  const TransitionWriter& who = trace_.writers[writer].who;
  return {who.engine, who.rank.value};
}

std::uint64_t HelloRules::incarnation_of(std::size_t writer) const {
  return trace_.writers[writer].who.incarnation.low();
}

HelloRules::Greeter& HelloRules::greeter(std::size_t writer) {
  const Walk start(is_partial(writer) ? std::nullopt
                                      : std::optional(relation::first_state(Machine::kHello)));
  return greeters_.try_emplace(writer, Greeter{.walk = start}).first->second;
}

std::optional<std::uint64_t> HelloRules::said_by(std::uint64_t incarnation) const {
  const auto writer = writer_of_.find(incarnation);
  if (writer == writer_of_.end()) return std::nullopt;
  const auto found = greeters_.find(writer->second);
  return found == greeters_.end() ? std::nullopt : found->second.compares;
}

void HelloRules::follow(const TransitionRecord& record) {
  Greeter& who = greeter(record.writer);
  const std::string_view from = who.walk.state_name();
  if (who.walk.take(record.transition, taken_)) return;
  breach_("HelloRelation", fmt::format("{} in state {}", to_string(record.transition), from));
}

void HelloRules::check_alike(const TransitionRecord& record) const {
  const auto owner = owners_.find(record.session);
  const auto said = said_by(record.peer);
  if (owner == owners_.end() || !owner->second.compares || !said ||
      *said == owner->second.compares) {
    return;
  }
  breach_("WelcomeMeansAlike",
          fmt::format("{:016x} is what it compares, the other one said {:016x}",
                      *owner->second.compares, *said));
}

void HelloRules::check_different(const TransitionRecord& record) const {
  if (record.peer == 0 || !says_different(record.detail)) return;
  const auto said = said_by(record.peer);
  const auto owner = owners_.find(record.session);
  const auto meets = meets_.find(record.writer);
  std::optional<std::uint64_t> ours;
  if (record.session != 0 && owner != owners_.end()) {
    ours = owner->second.compares;
  } else if (record.session == 0 && meets != meets_.end()) {
    ours = meets->second;
  }
  if (!said || !ours) return;
  const bool differs = record.session == 0 ? role_in(*said) != role_in(*ours) : *said != *ours;
  if (differs) return;
  breach_("RefusedMeansDifferent",
          fmt::format("it compares {:016x}, the other one said {:016x}", *ours, *said));
}

void HelloRules::check_welcomed(const TransitionRecord& record) {
  const auto owner = owners_.find(record.session);
  if (owner == owners_.end() || is_partial(owner->second.writer)) return;
  const Pair pair{record.session, incarnation_of(record.writer)};
  if (++welcomed_[pair] > welcomes_[pair]) {
    breach_("WelcomedMeansWelcome",
            fmt::format("the owner has welcomed it {} times", welcomes_[pair]));
  }
}

void HelloRules::check_asks(const TransitionRecord& record) {
  if (is_partial(record.writer)) return;
  const Greeter& who = greeter(record.writer);
  if (who.walk.state() == State::kHelloWelcomed && who.session == record.session) return;
  breach_("AsksOnceWelcomed",
          fmt::format("it is {} ({})", who.walk.state_name(),
                      who.session == record.session ? "by this owner" : "not by this owner"));
}

// That it listens is among what it has lost.
void HelloRules::take_over_unseen(const TransitionRecord& record) {
  if (!is_partial(record.writer) || owners_.contains(record.session)) return;
  latest_[rank_of(record.writer)] = record.session;
  owners_[record.session] = {record.writer, std::nullopt};
}

void HelloRules::check_one_owner(const TransitionRecord& record) const {
  const auto latest = latest_.find(rank_of(record.writer));
  if (latest == latest_.end() || latest->second == record.session) return;
  const Listener& owner = owners_.at(latest->second);
  if (owner.writer == record.writer) return;
  breach_("OneOwner",
          fmt::format("pid {} listens for its rank", trace_.writers[owner.writer].who.pid));
}

}  // namespace kvferry::ipc
