// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/transitions/transition_trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

namespace kvferry::ipc {
namespace {

enum class AttacherState : std::uint8_t {
  kIdle,
  kAsked,
  kGranted,
  kOpening,
  kMapped,
  kDraining,
  kStuck,
  kDrained,
  kClosing,
  kClosed,
  kReleasing
};

struct AttacherMove {
  AttacherState from;
  Transition transition;
  AttacherState to;
};

constexpr auto kAttacherMoves = std::to_array<AttacherMove>({
#define KVFERRY_ATTACHER_MOVE(from, transition, to) \
  {AttacherState::k##from, Transition::k##transition, AttacherState::k##to},
#include "transitions/attacher_moves.inc"
#undef KVFERRY_ATTACHER_MOVE
});

constexpr bool is_open(AttacherState state) noexcept {
  return state >= AttacherState::kOpening && state <= AttacherState::kClosing;
}

bool is_attacher_transition(Transition transition) noexcept {
  return std::any_of(
      kAttacherMoves.begin(), kAttacherMoves.end(),
      [transition](const AttacherMove& move) { return move.transition == transition; });
}

struct Lease {
  Epoch epoch;
  std::uint64_t holder = 0;
  bool ended = false;
};

/// One owner's life, as its records tell it.
struct Owner {
  std::size_t writer = 0;
  LeasePhase phase = LeasePhase::kVacant;
  Epoch epoch;
  LeaseId last_lease;
  std::map<std::uint64_t, Lease> leases;
  std::set<std::uint64_t> drained;  ///< Epochs.
  std::set<std::uint64_t> freed;
  std::set<std::uint64_t> kept;
};

/// One attacher under one session.
struct Attacher {
  AttacherState state = AttacherState::kIdle;
  Epoch epoch;
  LeaseId lease;
  std::set<std::uint64_t> released;
};

class Checker {
 public:
  explicit Checker(const TransitionTrace& trace) : trace_(trace) {
    for (std::size_t i = 0; i < trace.writers.size(); ++i) {
      writer_of_.emplace(trace.writers[i].who.incarnation.low(), i);
    }
  }

  std::vector<TransitionBreach> run() {
    for (at_ = 0; at_ < trace_.records.size(); ++at_) {
      const TransitionRecord& record = trace_.records[at_];
      check_alive(record);
      if (is_attacher_transition(record.transition)) {
        attacher_transition(record);
      } else if (record.session != 0) {
        owner_transition(record);
      }
    }
    return std::move(violations_);
  }

 private:
  void breach(std::string_view rule, std::string what) {
    violations_.push_back({rule, at_, std::move(what)});
  }
  [[nodiscard]] bool is_partial(std::size_t writer) const {
    return trace_.writers[writer].lost > 0;
  }

  // A proven death is one: nothing comes from there any more.
  void check_alive(const TransitionRecord& record) {
    const std::uint64_t self = trace_.writers[record.writer].who.incarnation.low();
    if (dead_.contains(self)) breach("DeadMeansDead", "its death had been taken as proven");
  }

  Owner& owner_of(const TransitionRecord& record) {
    const auto [place, fresh] = owners_.try_emplace(record.session);
    if (fresh) place->second.writer = record.writer;
    return place->second;
  }

  // ---- owner ----

  void owner_transition(const TransitionRecord& record) {
    Owner& owner = owner_of(record);
    if (owner.writer != record.writer) {
      return breach("OneWriter", "another process writes this session's owner transitions");
    }
    switch (record.transition) {
      case Transition::kOwnerReady: return move(owner, record, LeasePhase::kReady);
      case Transition::kOwnerRevoke: return move(owner, record, LeasePhase::kRevoking);
      case Transition::kOwnerCleared: return cleared(owner, record);
      case Transition::kOwnerQuarantined: return quarantined(owner, record);
      case Transition::kOwnerShutdown: return move(owner, record, LeasePhase::kShutdown);
      case Transition::kOwnerRecord: return record_lease(owner, record);
      case Transition::kOwnerGranted: return granted(owner, record);
      case Transition::kOwnerWithdraw: return end_lease(owner, record);
      case Transition::kOwnerSeesRelease: return sees_release(owner, record);
      case Transition::kOwnerSeesDeath: return sees_death(owner, record);
      case Transition::kOwnerDrained: owner.drained.insert(record.epoch.value); return;
      case Transition::kOwnerFree: return free(owner, record);
      case Transition::kOwnerReap: return reap(owner, record);
      case Transition::kOwnerKeep: owner.kept.insert(record.epoch.value); return;
      default: return;  // of no consequence to the rules
    }
  }

  void move(Owner& owner, const TransitionRecord& record, LeasePhase to) {
    const bool known = owner.epoch.value != 0 || !is_partial(record.writer);
    const std::uint64_t growth = to == LeasePhase::kReady ? 1 : 0;
    if (known && (!can_move(owner.phase, to) || record.epoch.value != owner.epoch.value + growth)) {
      breach("PhaseRelation",
             fmt::format("from epoch {} {} to epoch {} {}", owner.epoch.value,
                         to_string(owner.phase), record.epoch.value, to_string(to)));
    }
    owner.phase = to;
    owner.epoch = record.epoch;
  }

  void record_lease(Owner& owner, const TransitionRecord& record) {
    if (owner.epoch.value != 0 &&
        (owner.phase != LeasePhase::kReady || owner.epoch != record.epoch)) {
      breach("NoGrantAfterRevoke",
             fmt::format("lease {} on epoch {} while epoch {} is {}", record.lease.value,
                         record.epoch.value, owner.epoch.value, to_string(owner.phase)));
    }
    if (record.lease <= owner.last_lease) {
      breach("LeasesGrow",
             fmt::format("lease {} after lease {}", record.lease.value, owner.last_lease.value));
    }
    owner.last_lease = record.lease;
    owner.leases[record.lease.value] = {record.epoch, record.peer, false};
  }

  void granted(const Owner& owner, const TransitionRecord& record) {
    if (!owner.leases.contains(record.lease.value) && !is_partial(record.writer)) {
      breach("RecordedBeforeSent", fmt::format("lease {} was never recorded", record.lease.value));
    }
  }

  static void end_lease(Owner& owner, const TransitionRecord& record) {
    if (const auto found = owner.leases.find(record.lease.value); found != owner.leases.end()) {
      found->second.ended = true;
    }
  }

  void sees_release(Owner& owner, const TransitionRecord& record) {
    end_lease(owner, record);
    const auto writer = writer_of_.find(record.peer);
    if (writer == writer_of_.end() || is_partial(writer->second)) return;
    const auto found = attachers_.find({writer->second, record.session});
    if (found == attachers_.end() || !found->second.released.contains(record.lease.value)) {
      breach("ReleasedByItsHolder",
             fmt::format("its holder never released lease {}", record.lease.value));
    }
  }

  void sees_death(Owner& owner, const TransitionRecord& record) {
    dead_.insert(record.peer);
    if (record.lease.value != 0) end_lease(owner, record);
  }

  void check_all_ended(const Owner& owner, Epoch epoch, std::string_view rule) {
    for (const auto& [id, lease] : owner.leases) {
      if (lease.epoch != epoch || lease.ended) continue;
      breach(rule, fmt::format("lease {} on epoch {} has not ended", id, epoch.value));
    }
  }

  // Whatever the owner believes: nobody who lives may have it open.
  void check_nobody_maps(const TransitionRecord& record) {
    for (const auto& [key, attacher] : attachers_) {
      const TransitionWriter& who = trace_.writers[key.first].who;
      if (key.second != record.session || attacher.epoch != record.epoch ||
          !is_open(attacher.state) || dead_.contains(who.incarnation.low())) {
        continue;
      }
      breach("FreedWhileMapped",
             fmt::format("{} pid {} has epoch {} mapped under lease {}", who.role, who.pid,
                         record.epoch.value, attacher.lease.value));
    }
  }

  void free(Owner& owner, const TransitionRecord& record) {
    check_nobody_maps(record);
    check_all_ended(owner, record.epoch, "FreedWhileLeased");
    if (!owner.drained.contains(record.epoch.value) && !is_partial(record.writer)) {
      breach("FreedMeansDrained",
             fmt::format("its own work on epoch {} was not seen to end", record.epoch.value));
    }
    if (!owner.freed.insert(record.epoch.value).second) {
      breach("FreedOnce", fmt::format("epoch {} had been freed", record.epoch.value));
    }
  }

  void reap(Owner& owner, const TransitionRecord& record) {
    check_nobody_maps(record);
    check_all_ended(owner, record.epoch, "FreedWhileLeased");
    if (!owner.kept.contains(record.epoch.value) && !is_partial(record.writer)) {
      breach("ReapedOutOfQuarantine",
             fmt::format("epoch {} was not in quarantine", record.epoch.value));
    }
  }

  void cleared(Owner& owner, const TransitionRecord& record) {
    check_all_ended(owner, record.epoch, "ClearedMeansEnded");
    if (!owner.freed.contains(record.epoch.value) && !is_partial(record.writer)) {
      breach("ClearedMeansFreed", fmt::format("epoch {} was not freed", record.epoch.value));
    }
    move(owner, record, LeasePhase::kCleared);
  }

  void quarantined(Owner& owner, const TransitionRecord& record) {
    if (!owner.kept.contains(record.epoch.value) && !is_partial(record.writer)) {
      breach("QuarantinedMeansKept",
             fmt::format("no memory of epoch {} is in quarantine", record.epoch.value));
    }
    move(owner, record, LeasePhase::kQuarantined);
  }

  // ---- attacher ----

  void attacher_transition(const TransitionRecord& record) {
    const bool fresh = !attachers_.contains({record.writer, record.session});
    Attacher& attacher = attachers_[{record.writer, record.session}];
    const auto* found =
        std::find_if(kAttacherMoves.begin(), kAttacherMoves.end(), [&](const AttacherMove& move) {
          return move.from == attacher.state && move.transition == record.transition;
        });
    if (found == kAttacherMoves.end() && fresh && is_partial(record.writer)) {
      // Its earlier transitions are lost: it comes from wherever this one is allowed.
      found = std::find_if(
          kAttacherMoves.begin(), kAttacherMoves.end(),
          [&](const AttacherMove& move) { return move.transition == record.transition; });
    }
    if (found == kAttacherMoves.end()) {
      breach(rule_of(record.transition),
             fmt::format("{} in state {} (lease {})", to_string(record.transition),
                         static_cast<int>(attacher.state), attacher.lease.value));
      found = std::find_if(
          kAttacherMoves.begin(), kAttacherMoves.end(),
          [&](const AttacherMove& move) { return move.transition == record.transition; });
    }
    attacher.state = found->to;
    if (record.transition == Transition::kAttacherImport) check_granted(record);
    if (record.transition == Transition::kAttacherRelease) {
      attacher.released.insert(record.lease.value);
    }
    if (record.lease.value != 0) attacher.lease = record.lease;
    attacher.epoch = record.epoch;
  }

  static std::string_view rule_of(Transition transition) noexcept {
    if (transition == Transition::kAttacherRelease) return "ReleasedMeansUnmapped";
    if (transition == Transition::kAttacherUnmap) return "UnmappedMeansDrained";
    return "AttacherRelation";
  }

  void check_granted(const TransitionRecord& record) {
    const auto owner = owners_.find(record.session);
    if (owner == owners_.end() || is_partial(owner->second.writer)) return;
    const auto lease = owner->second.leases.find(record.lease.value);
    if (lease == owner->second.leases.end() || lease->second.epoch != record.epoch) {
      breach("OpenedAsGranted", fmt::format("lease {} was not granted on epoch {}",
                                            record.lease.value, record.epoch.value));
    }
  }

  const TransitionTrace& trace_;
  std::size_t at_ = 0;
  std::map<std::uint64_t, std::size_t> writer_of_;                       ///< By incarnation.
  std::map<std::uint64_t, Owner> owners_;                                ///< By session.
  std::map<std::pair<std::size_t, std::uint64_t>, Attacher> attachers_;  ///< By writer, session.
  std::set<std::uint64_t> dead_;                                         ///< Incarnations.
  std::vector<TransitionBreach> violations_;
};

}  // namespace

std::vector<TransitionBreach> check_transitions(const TransitionTrace& trace) {
  return Checker(trace).run();
}

}  // namespace kvferry::ipc
