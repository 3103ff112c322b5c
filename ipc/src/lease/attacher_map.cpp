// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/keep.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"
#include "lease/attacher_impl.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace kvferry::ipc {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstImportBackoff{50};
constexpr milliseconds kLongestImportBackoff{2000};
constexpr milliseconds kStuckRetry{1000};

}  // namespace

void LeaseAttacher::Impl::on_grant(lease::Grant grant) {
  record(Transition::kAttacherGrant, grant.epoch, grant.lease);
  const auto word = owner_words_->load();
  const bool current = word && *word == words::OwnerState{grant.epoch, LeasePhase::kReady};
  if (!current || grant.epoch < next_epoch_) {
    // Revoked on its way, or asked for before a local clear: given back unopened.
    grant.handles.clear();
    record(Transition::kAttacherReturn, grant.epoch, grant.lease);
    log_info("{}: lease {} on epoch {} given back unopened", tag_, grant.lease.value,
             grant.epoch.value);
    if (!current) next_epoch_ = std::max(next_epoch_, Epoch{grant.epoch.value + 1});
    acknowledge(grant.lease);
    return request_after_backoff();
  }
  const LeaseId lease = grant.lease;
  const Epoch epoch = grant.epoch;
  if (const Status imported = import(grant); !imported) {
    log_error("{}: lease {} on epoch {}: {}", tag_, lease.value, epoch.value,
              imported.error().to_string());
    note(imported.error().to_string());
    import_backoff_ = import_backoff_ == milliseconds{}
                          ? kFirstImportBackoff
                          : std::min(2 * import_backoff_, kLongestImportBackoff);
    next_epoch_ = epoch;  // the same one again, after a while
    if (held_) {
      if (!let_go(Deadline::after(options_.timeouts.drain), "its user refused it")) return;
    } else {
      record(Transition::kAttacherFailed, epoch, lease);
      acknowledge(lease);
    }
    return request_after_backoff();
  }
  import_backoff_ = {};
  search_backoff_ = {};
  stage_ = Stage::kMapped;
  words_->set_attached(lease);
  view_draft_.epoch = epoch;
  view_draft_.phase = LeasePhase::kReady;
  note({});
  log_info("{}: epoch {} mapped under lease {}: {}, {}", tag_, epoch.value, lease.value,
           format_size(held_->arena.total_bytes()),
           grant.prepared ? "its contents are kept" : "its contents are new");
}

// After an error either nothing is mapped, or held_ is and is to be let go.
Status LeaseAttacher::Impl::import(lease::Grant& grant) {
  const bool stable = options_.stable_addresses && options_.identity.handles == HandleKind::kVmm;
  KVFERRY_TRY(attempt(Transition::kAttacherImport, grant.epoch, grant.lease, grant.handles.size()));
  KVFERRY_ASSIGN(Arena arena, Arena::import(device_, grant.epoch, grant.layout,
                                            std::move(grant.handles), stable ? &ranges_ : nullptr));
  held_.emplace(Held{grant.lease, std::move(arena), false, LeaseId{}});
  KVFERRY_TRY(attempt(Transition::kAttacherMapped, grant.epoch, grant.lease));
  KVFERRY_TRY(
      user_.on_mapped(session_, held_->arena,
                      grant.prepared ? ArenaContents::kPrepared : ArenaContents::kUndefined));
  held_->accepted = true;
  held_->prepared_by = grant.prepared.value_or(grant.lease);
  if (!grant.prepared) say_prepared(grant.lease);
  return ok();
}

// Strictly after our user has observed the end of the zeroing.
void LeaseAttacher::Impl::say_prepared(LeaseId lease) {
  words_->set_prepared(lease);
  if (!socket_) return;
  // The words are the truth: an owner whose buffer is full finds it by itself.
  (void)lease::send(*socket_, lease::LeaseMessage::kPrepared, lease::LeaseBody{lease});
}

// Strictly after the last close.
void LeaseAttacher::Impl::acknowledge(LeaseId lease) {
  KVFERRY_CHECK(!held_, "an acknowledgement of memory that is still mapped");
  words_->set_attached(LeaseId{});
  if (lease > words_->released()) release_up_to(lease);
  if (!socket_) return;
  // The words are the truth: an owner whose buffer is full finds it by itself.
  (void)lease::send(*socket_, lease::LeaseMessage::kReleased, lease::LeaseBody{lease});
}

void LeaseAttacher::Impl::release_up_to(LeaseId lease) {
  record(Transition::kAttacherRelease, Epoch{}, lease);
  if (is_mutant("release_by_epoch")) lease = LeaseId{view_draft_.epoch.value};
  if (lease > words_->released()) words_->release_up_to(lease);
  record(Transition::kAttacherReleased, Epoch{}, lease);
}

// A lease that the owner recorded and whose grant never came.
void LeaseAttacher::Impl::return_unopened(LeaseId lease) {
  record(Transition::kAttacherReturn, Epoch{}, lease);
  release_up_to(lease);
}

void LeaseAttacher::Impl::check_word() {
  if (!owner_words_ || !socket_) return;
  const auto word = owner_words_->load();
  if (!word) {
    log_error("{}: {}", tag_, word.error().to_string());
    return lose_owner(word.error().to_string());
  }
  view_draft_.epoch = word->epoch;
  view_draft_.phase = word->phase;
  if (!held_ || stage_ == Stage::kStuck) return;
  const Epoch epoch = held_->arena.epoch();
  if (*word == words::OwnerState{epoch, LeasePhase::kReady}) return;
  changed();  // who waits for it learns of the revoke before the drain
  next_epoch_ = std::max(next_epoch_, Epoch{epoch.value + 1});
  if (let_go(
          Deadline::after(options_.timeouts.drain),
          fmt::format("owner word says epoch {} {}", word->epoch.value, to_string(word->phase)))) {
    go_on();
  }
}

// The one free of the attacher's side: quiesce, drop pointers, close every segment, and only then
// say so.
Status LeaseAttacher::Impl::let_go(Deadline deadline, std::string_view why) {
  const Epoch epoch = held_->arena.epoch();
  if (memory_lost_) {
    return KVFERRY_ERROR(kCuda, "{}: epoch {} could not be closed; restart this process", tag_,
                         epoch.value);
  }
  const TimePoint started = MonotonicClock::now();
  log_info("{}: detaches from epoch {} (lease {}): {}; drains at most {} ms", tag_, epoch.value,
           held_->lease.value, why, std::chrono::ceil<milliseconds>(deadline.remaining()).count());
  if (is_mutant("release_before_drain")) release_up_to(held_->lease);
  while (is_mutant("both_sides_wait") && owner_words_->load() &&
         owner_words_->load()->phase == LeasePhase::kRevoking) {
    // wait-none: a mistake that is built into a copy of this file for its tests
    ::poll(nullptr, 0, 1);
  }
  Status idle = attempt(Transition::kAttacherDrain, epoch, held_->lease);
  if (idle) idle = user_.quiesce(epoch, deadline);
  record(idle ? Transition::kAttacherDrained : Transition::kAttacherStuck, epoch, held_->lease);
  if (!idle) {
    if (is_mover() && !is_mutant("no_fail_stop")) {
      log_error("{}: epoch {} cannot be drained: {}; this mover exits, its death ends the lease",
                tag_, epoch.value, idle.error().to_string());
      ::_exit(kCannotDrainExit);
    }
    Error error = KVFERRY_ERROR(kTimeout,
                                "{}: epoch {} stays mapped, this worker's work on it did not end: "
                                "{}",
                                tag_, epoch.value, idle.error().to_string());
    stay_stuck(error);
    return error;
  }
  user_.on_unmapped(epoch);
  const Status released = close_arena();
  if (!released) {
    // Not closed for certain, so not acknowledged either.
    log_error("{}: epoch {}: {}", tag_, epoch.value, released.error().to_string());
    if (is_mover()) ::_exit(kCannotDrainExit);
    memory_lost_ = true;
    stay_stuck(released.error());
    return released.error();
  }
  const LeaseId lease = held_->lease;
  held_.reset();
  user_.on_freed(epoch);
  acknowledge(lease);
  stage_ = Stage::kIdle;
  log_info("{}: epoch {} unmapped, lease {} released after {} ms", tag_, epoch.value, lease.value,
           std::chrono::duration_cast<milliseconds>(MonotonicClock::now() - started).count());
  return ok();
}

// Every segment.
Status LeaseAttacher::Impl::close_arena() {
  const Epoch epoch = held_->arena.epoch();
  if (is_mutant("forgets_to_unmap")) {
    keep_until_process_end(std::move(held_->arena));
    return ok();
  }
  Status released = attempt(Transition::kAttacherUnmap, epoch, held_->lease);
  if (is_mutant("half_import_leaks") && !held_->accepted) {
    keep_until_process_end(std::move(held_->arena));
  }
  if (released) released = held_->arena.release();
  record(released ? Transition::kAttacherUnmapped : Transition::kAttacherStuck, epoch,
         held_->lease);
  return released;
}

void LeaseAttacher::Impl::stay_stuck(const Error& why) {
  log_error("{}", why.to_string());
  note(why.to_string());
  stage_ = Stage::kStuck;
  next_epoch_ = std::max(next_epoch_, Epoch{held_->arena.epoch().value});
  if (memory_lost_) return;
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = loop_.after(kStuckRetry, [this] {
    timer_ = 0;
    if (held_ && let_go(Deadline::after(options_.timeouts.drain), "tries again")) go_on();
    changed();
  });
}

// After a detach: ask for the next epoch, or look for the next owner.
void LeaseAttacher::Impl::go_on() {
  if (shut_) return;
  note({});
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = 0;
  if (owner_lost_) return search("the owner is gone");
  request_after_backoff();
}

}  // namespace kvferry::ipc
