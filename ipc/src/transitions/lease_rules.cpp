// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "transitions/lease_rules.hpp"

#include <fmt/format.h>

namespace kvferry::ipc {
namespace {

using relation::Machine;
using relation::State;
using relation::Walk;

bool is_open(std::optional<State> state) noexcept {
  return state >= State::kAttacherOpening && state <= State::kAttacherClosing;
}

bool is_owner_transition(Transition transition) noexcept {
  return transition >= Transition::kOwnerAllocate && transition <= Transition::kOwnerShutdown;
}

std::string_view rule_of(Transition transition) noexcept {
  if (transition == Transition::kAttacherRelease) return "ReleasedMeansUnmapped";
  if (transition == Transition::kAttacherUnmap) return "UnmappedMeansDrained";
  return "AttacherRelation";
}

template <typename Leases> void end_lease(Leases& leases, LeaseId id) {
  if (const auto found = leases.find(id.value); found != leases.end()) found->second.ended = true;
}

}  // namespace

LeaseRules::LeaseRules(const TransitionTrace& trace,
                       std::set<const relation::Move*>* taken,
                       Breach breach)
    : trace_(trace), taken_(taken), breach_(std::move(breach)) {
  for (std::size_t i = 0; i < trace.writers.size(); ++i) writer_of_.emplace(incarnation_of(i), i);
}

void LeaseRules::take(const TransitionRecord& record) {
  check_alive(record);
  if (record.transition == Transition::kManagerSeesDeath) dead_.insert(record.peer);
  if (record.transition == Transition::kAttacherSeesDeath) owner_died(record.session);
  if (relation::machine_of(record.transition) == Machine::kAttacher) {
    attacher_transition(record);
  } else if (is_owner_transition(record.transition) && record.session != 0) {
    owner_transition(record);
  }
}

std::uint64_t LeaseRules::incarnation_of(std::size_t writer) const {
  return trace_.writers[writer].who.incarnation.low();
}

bool LeaseRules::is_partial(std::size_t writer) const { return trace_.writers[writer].lost > 0; }

bool LeaseRules::is_dead(std::size_t writer) const {
  return dead_.contains(incarnation_of(writer));
}

bool LeaseRules::may_use(std::size_t writer, const TransitionRecord& record) const {
  if (is_partial(writer)) return true;
  if (const auto owner = owners_.find(record.session);
      owner != owners_.end() && owner->second.writer == writer) {
    return owner->second.allocated == record.epoch &&
           !owner->second.drained.contains(record.epoch.value);
  }
  const auto attacher = attachers_.find({writer, record.session});
  return attacher != attachers_.end() && attacher->second.epoch == record.epoch &&
         is_open(attacher->second.walk.state()) &&
         attacher->second.walk.state() < State::kAttacherDrained;
}

std::optional<std::size_t> LeaseRules::whole_writer(std::uint64_t incarnation) const {
  const auto writer = writer_of_.find(incarnation);
  if (writer == writer_of_.end() || is_partial(writer->second)) return std::nullopt;
  return writer->second;
}

const LeaseRules::Owner* LeaseRules::owner_in(std::uint64_t session, std::size_t writer) const {
  const auto owner = owners_.find(session);
  return owner != owners_.end() && owner->second.writer == writer ? &owner->second : nullptr;
}

std::string LeaseRules::against_cleared(const TransitionRecord& record) const {
  const auto writer = whole_writer(record.peer);
  if (!writer) return {};
  if (const Owner* owner = owner_in(record.session, *writer)) {
    const auto told = owner->told_quarantined.find(record.epoch.value);
    if (told == owner->told_quarantined.end()) {
      return fmt::format("it has not published epoch {} as cleared", record.epoch.value);
    }
    if (told->second == (record.detail != 0)) return {};
    return fmt::format(
        "it has published epoch {} as {}, the manager took {} bytes to be in "
        "quarantine",
        record.epoch.value, told->second ? "quarantined" : "cleared", record.detail);
  }
  const auto attacher = attachers_.find({*writer, record.session});
  if (attacher == attachers_.end() || attacher->second.epoch > record.epoch ||
      !is_open(attacher->second.walk.state())) {
    return {};
  }
  return fmt::format("it has epoch {} mapped under lease {}", attacher->second.epoch.value,
                     attacher->second.lease.value);
}

std::string LeaseRules::against_ready(const TransitionRecord& record,
                                      std::chrono::nanoseconds told) const {
  const auto writer = whole_writer(record.peer);
  if (!writer) return {};
  if (const Owner* owner = owner_in(record.session, *writer)) {
    if (owner->epoch >= record.epoch) return {};
    return fmt::format("it has not published epoch {} as ready", record.epoch.value);
  }
  const auto attacher = attachers_.find({*writer, record.session});
  if (attacher != attachers_.end() && attacher->second.mapped >= record.epoch &&
      (is_open(attacher->second.walk.state()) || attacher->second.closed >= told)) {
    return {};
  }
  return fmt::format("it has not mapped epoch {}", record.epoch.value);
}

bool LeaseRules::is_worker(std::uint64_t incarnation) const {
  const auto writer = writer_of_.find(incarnation);
  return writer != writer_of_.end() && trace_.writers[writer->second].who.role == "worker";
}

Walk LeaseRules::start_at(State state, std::size_t writer) const {
  return Walk(is_partial(writer) ? std::nullopt : std::optional(state));
}

// A proven death is one: nothing comes from there any more.
void LeaseRules::check_alive(const TransitionRecord& record) {
  const std::uint64_t self = incarnation_of(record.writer);
  if (dead_.contains(self)) breach_("DeadMeansDead", "its death had been taken as proven");
}

LeaseRules::Owner& LeaseRules::owner_of(const TransitionRecord& record) {
  const auto [place, fresh] = owners_.try_emplace(record.session);
  if (fresh) {
    place->second.writer = record.writer;
    place->second.walk = start_at(State::kOwnerIdle, record.writer);
  }
  return place->second;
}

// ---- owner ----

void LeaseRules::owner_transition(const TransitionRecord& record) {
  Owner& owner = owner_of(record);
  if (owner.writer != record.writer) {
    return breach_("OneWriter", "another process writes this session's owner transitions");
  }
  follow(owner, record);
  switch (record.transition) {
    case Transition::kOwnerAllocate: owner.allocated = record.epoch; return;
    case Transition::kOwnerReady: return move(owner, record, LeasePhase::kReady);
    case Transition::kOwnerRevoke: return move(owner, record, LeasePhase::kRevoking);
    case Transition::kOwnerCleared: return cleared(owner, record);
    case Transition::kOwnerQuarantined: return quarantined(owner, record);
    case Transition::kOwnerShutdown: return move(owner, record, LeasePhase::kShutdown);
    case Transition::kOwnerRecord: return record_lease(owner, record);
    case Transition::kOwnerGranted: return granted(owner, record);
    case Transition::kOwnerWithdraw: return end_lease(owner.leases, record.lease);
    case Transition::kOwnerSeesRelease: return sees_release(owner, record);
    case Transition::kOwnerSeesDeath: return sees_death(owner, record);
    case Transition::kOwnerDrained: owner.drained.insert(record.epoch.value); return;
    case Transition::kOwnerFree: return free(owner, record);
    case Transition::kOwnerReap: return reap(owner, record);
    case Transition::kOwnerKeep: owner.kept.insert(record.epoch.value); return;
    case Transition::kOwnerKill:
      if (is_worker(record.peer)) breach_("WorkersNeverKilled", "no deadline ends a worker");
      return;
    default: return;  // of no consequence to the rules
  }
}

void LeaseRules::follow(Owner& owner, const TransitionRecord& record) {
  const auto machine = relation::machine_of(record.transition);
  if (machine == Machine::kOwner) {
    const std::string_view from = owner.walk.state_name();
    if (owner.walk.take(record.transition, taken_)) return;
    breach_("OwnerRelation", fmt::format("{} in state {}", to_string(record.transition), from));
  } else if (machine == Machine::kLease && record.lease.value != 0) {
    Walk& walk = owner.lease_walks
                     .try_emplace(record.lease.value, start_at(State::kLeaseNone, record.writer))
                     .first->second;
    const std::string_view from = walk.state_name();
    if (walk.take(record.transition, taken_)) return;
    breach_("LeaseRelation", fmt::format("{} of lease {} in state {}", to_string(record.transition),
                                         record.lease.value, from));
  }
}

void LeaseRules::move(Owner& owner, const TransitionRecord& record, LeasePhase to) {
  const bool known = owner.epoch.value != 0 || !is_partial(record.writer);
  const std::uint64_t growth = to == LeasePhase::kReady ? 1 : 0;
  if (known && (!can_move(owner.phase, to) || record.epoch.value != owner.epoch.value + growth)) {
    breach_("PhaseRelation",
            fmt::format("from epoch {} {} to epoch {} {}", owner.epoch.value,
                        to_string(owner.phase), record.epoch.value, to_string(to)));
  }
  owner.phase = to;
  owner.epoch = record.epoch;
}

void LeaseRules::record_lease(Owner& owner, const TransitionRecord& record) {
  if (owner.epoch.value != 0 &&
      (owner.phase != LeasePhase::kReady || owner.epoch != record.epoch)) {
    breach_("NoGrantAfterRevoke",
            fmt::format("lease {} on epoch {} while epoch {} is {}", record.lease.value,
                        record.epoch.value, owner.epoch.value, to_string(owner.phase)));
  }
  if (record.lease <= owner.last_lease) {
    breach_("LeasesGrow",
            fmt::format("lease {} after lease {}", record.lease.value, owner.last_lease.value));
  }
  if (is_worker(record.peer)) {
    for (const auto& [id, lease] : owner.leases) {
      if (lease.epoch != record.epoch || lease.ended) continue;
      breach_("OneWorkerAtATime",
              fmt::format("a worker has epoch {} under lease {}", record.epoch.value, id));
    }
  }
  owner.last_lease = record.lease;
  owner.leases[record.lease.value] = {record.epoch, record.peer, false};
}

void LeaseRules::granted(const Owner& owner, const TransitionRecord& record) {
  if (!owner.leases.contains(record.lease.value) && !is_partial(record.writer)) {
    breach_("RecordedBeforeSent", fmt::format("lease {} was never recorded", record.lease.value));
  }
}

void LeaseRules::sees_release(Owner& owner, const TransitionRecord& record) {
  end_lease(owner.leases, record.lease);
  const auto writer = writer_of_.find(record.peer);
  if (writer == writer_of_.end() || is_partial(writer->second)) return;
  const auto found = attachers_.find({writer->second, record.session});
  if (found == attachers_.end() || !found->second.released.contains(record.lease.value)) {
    breach_("ReleasedByItsHolder",
            fmt::format("its holder never released lease {}", record.lease.value));
  }
}

void LeaseRules::sees_death(Owner& owner, const TransitionRecord& record) {
  dead_.insert(record.peer);
  if (record.lease.value != 0) end_lease(owner.leases, record.lease);
}

void LeaseRules::check_all_ended(const Owner& owner, Epoch epoch, std::string_view rule) {
  for (const auto& [id, lease] : owner.leases) {
    if (lease.epoch != epoch || lease.ended) continue;
    breach_(rule, fmt::format("lease {} on epoch {} has not ended", id, epoch.value));
  }
}

void LeaseRules::check_nobody_maps(const Owner& owner, const TransitionRecord& record) {
  for (const auto& [key, attacher] : attachers_) {
    const TransitionWriter& who = trace_.writers[key.first].who;
    if (key.second != record.session || attacher.epoch != record.epoch ||
        !is_open(attacher.walk.state()) || dead_.contains(who.incarnation.low())) {
      continue;
    }
    // Its lease was recorded among what the owner has lost; and so, perhaps, was its death.
    if (is_partial(record.writer) && !owner.leases.contains(attacher.lease.value)) continue;
    breach_("FreedWhileMapped",
            fmt::format("{} pid {} has epoch {} mapped under lease {}", who.role, who.pid,
                        record.epoch.value, attacher.lease.value));
  }
}

void LeaseRules::free(Owner& owner, const TransitionRecord& record) {
  check_nobody_maps(owner, record);
  check_all_ended(owner, record.epoch, "FreedWhileLeased");
  if (!owner.drained.contains(record.epoch.value) && !is_partial(record.writer)) {
    breach_("FreedMeansDrained",
            fmt::format("its own work on epoch {} was not seen to end", record.epoch.value));
  }
  if (!owner.freed.insert(record.epoch.value).second) {
    breach_("FreedOnce", fmt::format("epoch {} had been freed", record.epoch.value));
  }
}

void LeaseRules::reap(Owner& owner, const TransitionRecord& record) {
  check_nobody_maps(owner, record);
  check_all_ended(owner, record.epoch, "FreedWhileLeased");
  if (!owner.kept.contains(record.epoch.value) && !is_partial(record.writer)) {
    breach_("ReapedOutOfQuarantine",
            fmt::format("epoch {} was not in quarantine", record.epoch.value));
  }
}

void LeaseRules::cleared(Owner& owner, const TransitionRecord& record) {
  check_all_ended(owner, record.epoch, "ClearedMeansEnded");
  if (!owner.freed.contains(record.epoch.value) && !is_partial(record.writer)) {
    breach_("ClearedMeansFreed", fmt::format("epoch {} was not freed", record.epoch.value));
  }
  owner.told_quarantined[record.epoch.value] = false;
  move(owner, record, LeasePhase::kCleared);
}

void LeaseRules::quarantined(Owner& owner, const TransitionRecord& record) {
  if (!owner.kept.contains(record.epoch.value) && !is_partial(record.writer)) {
    breach_("QuarantinedMeansKept",
            fmt::format("no memory of epoch {} is in quarantine", record.epoch.value));
  }
  owner.told_quarantined[record.epoch.value] = true;
  move(owner, record, LeasePhase::kQuarantined);
}

// ---- attacher ----

void LeaseRules::attacher_transition(const TransitionRecord& record) {
  const auto [place, fresh] = attachers_.try_emplace({record.writer, record.session});
  Attacher& attacher = place->second;
  if (fresh) attacher.walk = start_at(State::kAttacherIdle, record.writer);
  const std::string_view from = attacher.walk.state_name();
  if (!attacher.walk.take(record.transition, taken_)) {
    breach_(rule_of(record.transition),
            fmt::format("{} in state {} (lease {})", to_string(record.transition), from,
                        attacher.lease.value));
  }
  if (record.transition == Transition::kAttacherAsk) check_holds_nothing(record, attacher);
  if (record.transition == Transition::kAttacherImport) check_granted(record);
  if (record.transition == Transition::kAttacherMapped) attacher.mapped = record.epoch;
  if (record.transition == Transition::kAttacherUnmapped) attacher.closed = record.time;
  if (record.transition == Transition::kAttacherRelease) {
    attacher.released.insert(record.lease.value);
  }
  if (record.lease.value != 0) attacher.lease = record.lease;
  attacher.epoch = record.epoch;
}

void LeaseRules::owner_died(std::uint64_t session) {
  const auto owner = owners_.find(session);
  if (owner == owners_.end()) return;
  dead_.insert(incarnation_of(owner->second.writer));
}

void LeaseRules::check_holds_nothing(const TransitionRecord& record, const Attacher& attacher) {
  for (const auto& [key, other] : attachers_) {
    if (key.first != record.writer || key.second == record.session) continue;
    if (!is_open(other.walk.state())) continue;
    breach_("HoldsNothingWhileSearching",
            fmt::format("epoch {} of another owner is open", other.epoch.value));
  }
  const auto owner = owners_.find(record.session);
  if (owner == owners_.end() || is_partial(record.writer)) return;
  const std::uint64_t self = incarnation_of(record.writer);
  for (const auto& [id, lease] : owner->second.leases) {
    if (lease.holder != self || lease.ended || attacher.released.contains(id)) continue;
    breach_("AsksWithNoLease", fmt::format("lease {} was not released", id));
  }
}

void LeaseRules::check_granted(const TransitionRecord& record) {
  const auto owner = owners_.find(record.session);
  if (owner == owners_.end() || is_partial(owner->second.writer)) return;
  const auto lease = owner->second.leases.find(record.lease.value);
  if (lease == owner->second.leases.end() || lease->second.epoch != record.epoch) {
    breach_("OpenedAsGranted", fmt::format("lease {} was not granted on epoch {}",
                                           record.lease.value, record.epoch.value));
  }
}

}  // namespace kvferry::ipc
