// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"
#include "lease/owner_impl.hpp"
#include "lease/process_memory.hpp"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <utility>

namespace kvferry::ipc {
namespace {

using lease::Slot;

constexpr std::size_t kOutcomesKept = 256;
// The driver tells nobody when memory comes back: it is asked, from the loop's timer.
constexpr auto kSettleStep = std::chrono::milliseconds(10);

std::int64_t ms_left(Deadline deadline) {
  return std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining()).count();
}

}  // namespace

std::optional<Result<ClearOutcome>> LeaseOwner::Impl::clear_without_work(Epoch wanted) const {
  if (wanted.value == 0 || wanted > epoch()) {
    return KVFERRY_ERROR(kStaleEpoch, "{}: epoch {} never was; the last one is {}", tag_,
                         wanted.value, epoch().value);
  }
  for (const ClearOutcome& outcome : outcomes_) {
    if (outcome.epoch == wanted) return outcome;
  }
  if (wanted < epoch()) {
    return KVFERRY_ERROR(kStaleEpoch, "{}: epoch {} was cleared more than {} clears ago", tag_,
                         wanted.value, kOutcomesKept);
  }
  return std::nullopt;
}

// Its stages have deadlines of their own: how long a caller waits says nothing about how long a
// healthy peer may drain.
void LeaseOwner::Impl::start_clear(Epoch wanted, const lease::Answer<ClearOutcome>& answer) {
  if (auto known = clear_without_work(wanted)) return answer.set(std::move(*known));
  if (clear_) {
    log_info("{}: the clear of epoch {} that runs answers another request, too", tag_,
             wanted.value);
    clear_->answers.push_back(answer);
    return;
  }
  KVFERRY_CHECK(phase() == LeasePhase::kReady && arena_, "a clear of an epoch that is not ready");
  const TimePoint started = MonotonicClock::now();
  const MemoryInfo before = memory_now();
  // Our own work ends first, as a rule. Where it does not, the others are asked to let go all the
  // same: admission here has ended for good, so that an epoch left at Ready would be a dead one.
  std::string own_work;
  if (const Status idle = quiesce_own(wanted, Deadline::after(options_.timeouts.drain)); idle) {
    user_.on_unmapped(wanted);
  } else {
    own_work = idle.error().message;
  }
  accepted_ = false;
  // From now on, not from the start: our own drain takes nothing from the others'.
  const Deadline end = Deadline::after(options_.timeouts.revoke);
  clear_.emplace(ClearRun{.epoch = wanted,
                          .started = started,
                          .answers = {answer},
                          .before = before,
                          .stage_end = end,
                          .bytes = arena_->total_bytes(),
                          .own_work = std::move(own_work)});
  move_to(LeasePhase::kRevoking, wanted, "clear");
  changed();  // now: where everybody lets go at once, the clear goes on before the next look
  const auto holders = slots_.holding(wanted);
  for (Slot* slot : holders) {
    if (!slot->connection) continue;
    // A full buffer is no loss: the words are the truth, and the attacher looks by itself.
    (void)lease::send(*slot->connection, lease::LeaseMessage::kRevoke, lease::RevokeBody{wanted});
  }
  if (!holders.empty()) {
    log_info("{}: clear of epoch {} waits for {}, at most {} ms", tag_, wanted.value,
             lease::describe(holders), ms_left(end));
    note(fmt::format("clear of epoch {} waits for {}", wanted.value, lease::describe(holders)));
  }
  set_stage(ClearStage::kWaiting, end);
}

Status LeaseOwner::Impl::quiesce_own(Epoch epoch, Deadline deadline) {
  Status idle = attempt(Transition::kOwnerDrain, epoch);
  if (idle) idle = user_.quiesce(epoch, deadline);
  record(idle ? Transition::kOwnerDrained : Transition::kOwnerStuck, epoch);
  if (idle) return idle;
  if (is_mover()) {
    log_error("{}: epoch {} cannot be drained: {}; this mover exits, its death frees the memory",
              tag_, epoch.value, idle.error().to_string());
    ::_exit(kCannotDrainExit);
  }
  log_error("{}: epoch {} is still in use by this worker: {}", tag_, epoch.value,
            idle.error().to_string());
  return idle;
}

// Asked once more, without a wait: its drain time is used up.
bool LeaseOwner::Impl::own_user_let_go() {
  if (clear_->own_work.empty()) return true;
  if (const Status idle = user_.quiesce(clear_->epoch, Deadline::after(Duration::zero())); !idle) {
    return false;
  }
  record(Transition::kOwnerDrained, clear_->epoch);
  log_info("{}: this worker's work on epoch {} has ended after all", tag_, clear_->epoch.value);
  clear_->own_work.clear();
  user_.on_unmapped(clear_->epoch);
  return true;
}

void LeaseOwner::Impl::set_stage(ClearStage stage, Deadline end) {
  clear_->stage = stage;
  clear_->stage_end = end;
  const bool steps = stage == ClearStage::kUnmapping || stage == ClearStage::kSettling;
  if (is_mutant("no_deadline")) return;
  arm_clear_timer(steps ? std::min(end.when(), MonotonicClock::now() + kSettleStep) : end.when());
}

void LeaseOwner::Impl::arm_clear_timer(TimePoint when) {
  if (clear_->timer != 0) loop_.cancel(clear_->timer);
  clear_->timer = loop_.at(when, [this] {
    clear_->timer = 0;
    on_clear_timer();
    tick();
  });
}

// Leases may have ended: go on as soon as all have.
void LeaseOwner::Impl::advance_clear() {
  if (!clear_) return;
  if (clear_->stage != ClearStage::kWaiting && clear_->stage != ClearStage::kKilling) return;
  const auto holders = slots_.holding(clear_->epoch);
  if (holders.empty() || is_mutant("free_without_waiting")) return free_arena();
  if (clear_->stage == ClearStage::kWaiting) return;
  const bool dying =
      std::any_of(holders.begin(), holders.end(), [](const Slot* slot) { return slot->killed; });
  // Every mover is proven dead and somebody who is not ours to end still holds on.
  if (!dying) quarantine_arena(lease::describe(holders));
}

void LeaseOwner::Impl::on_clear_timer() {
  collect_releases();
  switch (clear_->stage) {
    case ClearStage::kWaiting:
      if (slots_.holding(clear_->epoch).empty()) return;  // tick() goes on
      return end_movers();
    case ClearStage::kKilling: {
      const auto holders = slots_.holding(clear_->epoch);
      if (!holders.empty()) quarantine_arena(lease::describe(holders));
      return;
    }
    case ClearStage::kUnmapping: return free_arena();
    case ClearStage::kSettling: return check_settled();
  }
}

// The deadline is never permission to free: a mover is killed, and its death must then be proven; a
// worker or a foreign process is not ours to end.
void LeaseOwner::Impl::end_movers() {
  if (is_mutant("free_at_the_deadline")) return release_arena();
  std::uint64_t most_bytes = 0;
  bool any = false;
  const auto holders = slots_.holding(clear_->epoch);
  for (Slot* slot : holders) {
    if (slot->kind != ProcessKind::kMover) continue;
    const std::uint64_t held = lease::resident_bytes(slot->process.pid());
    most_bytes = std::max(most_bytes, held);
    log_warn("{}: {} did not let go of epoch {} in time (lease {}); killed, {} resident", tag_,
             slot->name(), clear_->epoch.value, slot->lease->id.value, format_size(held));
    record(Transition::kOwnerKill, *slot, *slot->lease);
    if (const Status sent = slot->process.signal(SIGKILL);
        !sent && sent.error().code != ErrorCode::kPeerDied) {
      log_error("{}: SIGKILL of {}: {}", tag_, slot->name(), sent.error().to_string());
    }
    slot->killed = true;
    any = true;
  }
  if (!any) return quarantine_arena(lease::describe(holders));
  const auto gib = static_cast<std::int64_t>((most_bytes + (1ULL << 30) - 1) >> 30);
  set_stage(ClearStage::kKilling,
            Deadline::after(options_.timeouts.kill + gib * options_.timeouts.kill_per_pinned_gib));
}

// All leases have ended. After a death one thing is left to rule out: a forked child of the dead
// process that keeps the mapping.
void LeaseOwner::Impl::free_arena() {
  if (!own_user_let_go()) return quarantine_arena({});
  const lease::Deaths* deaths = slots_.deaths(clear_->epoch);
  if (deaths == nullptr) {
    release_arena();
    return;
  }
  auto holders = arena_->mapped_elsewhere();
  if (!holders) {
    return quarantine_arena(fmt::format("{}: who maps it cannot be told: {}", describe(*deaths),
                                        holders.error().message));
  }
  clear_->holders = *holders;
  // An engine's memory is never given back to it while somebody maps it, whatever the handles.
  const bool waits = options_.identity.handles == HandleKind::kLegacy || arena_->is_borrowed();
  if (!waits || holders->empty()) {
    release_arena();
    return;
  }
  if (clear_->stage != ClearStage::kUnmapping) {
    log_info("{}: epoch {}: {} died, process {} still maps the memory; waits at most {} ms", tag_,
             clear_->epoch.value, describe(*deaths), lease::describe(*holders),
             options_.timeouts.settle.count());
    return set_stage(ClearStage::kUnmapping, Deadline::after(options_.timeouts.settle));
  }
  if (!clear_->stage_end.expired()) return set_stage(clear_->stage, clear_->stage_end);
  quarantine_arena(
      fmt::format("process {}, a child of dead {}", lease::describe(*holders), describe(*deaths)));
}

// The one free of the owner's side.
void LeaseOwner::Impl::release_arena() {
  const lease::Deaths* deaths = slots_.deaths(clear_->epoch);
  KVFERRY_CHECK(slots_.holding(clear_->epoch).empty() || is_mutant("free_without_waiting") ||
                    is_mutant("free_at_the_deadline"),
                "a free under a living lease");
  // Not as at the start: what the others gave back since then is not ours.
  clear_->check = lease::ReturnCheck(*arena_, memory_now().free_bytes);
  const Status planned = attempt(Transition::kOwnerFree, clear_->epoch);
  Status released = arena_->release();
  if (released && !planned) released = planned;
  record(Transition::kOwnerFreed, clear_->epoch);
  if (!released) {
    log_error("{}: epoch {}: {}", tag_, clear_->epoch.value, released.error().to_string());
    note(released.error().to_string());
  }
  if (arena_->is_borrowed()) {
    clear_->freed.emplace(std::move(*arena_));
    if (!released) clear_->failure = released.error().message;
  }
  arena_.reset();
  const bool sure = deaths == nullptr && released;
  if (sure && !clear_->freed) return finish_clear(ClearKind::kCleared, {}, 0);
  if (!sure) {
    log_info("{}: epoch {} freed; waits at most {} ms for the driver to show it", tag_,
             clear_->epoch.value, options_.timeouts.settle.count());
  }
  clear_->stage = ClearStage::kSettling;
  clear_->stage_end = Deadline::after(options_.timeouts.settle);
  check_settled();
}

// A quarantined epoch of the engine may have regions in the same allocation.
lease::Remains LeaseOwner::Impl::remains_of(const Arena& released) const {
  return lease::look_at_remains(released, [this](AllocationId id) {
    return (arena_ && lease::lends(*arena_, id)) || quarantine_.lends(id);
  });
}

// Whatever exists of an engine's released epoch; nothing when it is all gone.
void LeaseOwner::Impl::quarantine_remains(Epoch epoch, Arena freed, const std::string& failure) {
  const lease::Remains remains = remains_of(freed);
  if (remains.allocations == 0) return;
  lease::QuarantineItem item{
      .epoch = epoch, .bytes = remains.bytes, .holder = lease::describe_remains(remains, failure)};
  item.check = lease::ReturnCheck(freed, memory_now().free_bytes + arena_bytes());
  item.arena = std::move(freed);
  item.failure = failure;
  record(Transition::kOwnerKeep, epoch, item.bytes);
  quarantine_.add(std::move(item));
}

void LeaseOwner::Impl::check_settled() {
  const lease::Deaths* deaths = slots_.deaths(clear_->epoch);
  const std::string dead = deaths == nullptr ? std::string("nobody") : describe(*deaths);
  const lease::Remains remains = clear_->freed ? remains_of(*clear_->freed) : lease::Remains{};
  // Whether an engine freed its memory is asked of each allocation: others of its may come and go.
  const bool count_free = deaths != nullptr || !clear_->freed;
  if (remains.allocations == 0 &&
      (!count_free ||
       clear_->check.is_back(memory_now().free_bytes, clear_->bytes - remains.shared_bytes))) {
    const ClearKind kind = deaths == nullptr ? ClearKind::kCleared : ClearKind::kClearedPeerDead;
    return finish_clear(kind, fmt::format("died with the epoch mapped: {}", dead), 0);
  }
  // What release() failed to free will not be freed by waiting.
  if (!clear_->stage_end.expired() && (remains.allocations == 0 || clear_->failure.empty())) {
    return set_stage(ClearStage::kSettling, clear_->stage_end);
  }
  if (remains.allocations > 0) {
    std::string detail =
        fmt::format("{} of epoch {} are kept by {}", format_size(remains.bytes),
                    clear_->epoch.value, lease::describe_remains(remains, clear_->failure));
    quarantine_remains(clear_->epoch, std::move(*clear_->freed), clear_->failure);
    return finish_clear(ClearKind::kQuarantined, std::move(detail), remains.bytes);
  }
  std::string holder =
      clear_->holders.empty()
          ? fmt::format("a forked child of dead {}", dead)
          : fmt::format("process {}, a child of dead {}", lease::describe(clear_->holders), dead);
  if (!clear_->check.is_exact()) {
    holder += " (or another process allocated as much meanwhile, which the driver does not tell)";
  }
  lease::QuarantineItem item{.epoch = clear_->epoch, .bytes = clear_->bytes, .holder = holder};
  item.settle = true;
  item.check = std::move(clear_->check);
  record(Transition::kOwnerKeep, clear_->epoch, clear_->bytes);
  quarantine_.add(std::move(item));
  finish_clear(ClearKind::kQuarantined,
               fmt::format("epoch {} was freed, but {} did not come back to the driver within {} "
                           "ms: kept by {}; end that process",
                           clear_->epoch.value, format_size(clear_->bytes),
                           options_.timeouts.settle.count(), holder),
               clear_->bytes);
}

void LeaseOwner::Impl::quarantine_arena(std::string holder) {
  const bool own_user = !own_user_let_go();
  if (own_user) {
    holder += fmt::format("{}this worker's own work, which did not end ({})",
                          holder.empty() ? "" : ", ", clear_->own_work);
  }
  record(Transition::kOwnerKeep, clear_->epoch, clear_->bytes);
  lease::QuarantineItem item{.epoch = clear_->epoch, .bytes = clear_->bytes, .holder = holder};
  if (own_user) {
    // Our own work still uses the mapping: it stays, and so do its addresses.
    item.own_user = true;
    item.settle = slots_.deaths(clear_->epoch) != nullptr;
    item.ranges = std::exchange(ranges_, {});
    item.arena.emplace(std::move(*arena_));
  } else if (options_.identity.handles == HandleKind::kVmm && !arena_->is_borrowed()) {
    // Reference-counted: our references go now, the rest comes back when the peer lets go.
    item.check = lease::ReturnCheck(*arena_, memory_now().free_bytes);
    item.settle = slots_.deaths(clear_->epoch) != nullptr;
    if (const Status released = arena_->release(); !released) {
      log_error("{}: epoch {}: {}", tag_, clear_->epoch.value, released.error().to_string());
      item.settle = true;
    }
  } else {
    item.settle = slots_.deaths(clear_->epoch) != nullptr;
    item.arena.emplace(std::move(*arena_));
  }
  arena_.reset();
  quarantine_.add(std::move(item));
  finish_clear(ClearKind::kQuarantined,
               fmt::format("{} of epoch {} are kept by {}; they come back when it lets go or ends",
                           format_size(clear_->bytes), clear_->epoch.value, holder),
               clear_->bytes);
}

void LeaseOwner::Impl::finish_clear(ClearKind kind,
                                    std::string detail,
                                    std::uint64_t quarantined_bytes) {
  ClearRun run = std::move(*clear_);
  if (run.timer != 0) loop_.cancel(run.timer);
  clear_.reset();
  if (kind != ClearKind::kQuarantined) slots_.forget_deaths(run.epoch);
  user_.on_freed(run.epoch);
  ClearOutcome outcome;
  outcome.kind = kind;
  outcome.epoch = run.epoch;
  outcome.detail = kind == ClearKind::kCleared ? std::string() : std::move(detail);
  outcome.quarantined_bytes = quarantined_bytes;
  outcome.before = run.before;
  outcome.after = memory_now();
  outcome.took =
      std::chrono::duration_cast<std::chrono::microseconds>(MonotonicClock::now() - run.started);
  const bool quarantined = kind == ClearKind::kQuarantined;
  move_to(quarantined ? LeasePhase::kQuarantined : LeasePhase::kCleared, run.epoch,
          to_string(kind));
  note(outcome.detail);
  if (outcomes_.size() == kOutcomesKept) outcomes_.pop_front();
  outcomes_.push_back(outcome);
  log_info("{}: clear of epoch {} ended after {} ms: {} {}", tag_, run.epoch.value,
           std::chrono::duration_cast<std::chrono::milliseconds>(outcome.took).count(),
           to_string(kind), outcome.detail);
  changed();  // before the answer: the caller finds the new view
  for (const auto& answer : run.answers) answer.set(outcome);
}

}  // namespace kvferry::ipc
