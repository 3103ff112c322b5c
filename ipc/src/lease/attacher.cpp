// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/keep.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "lease/attacher_impl.hpp"
#include "lease/view_equality.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr auto kBelt = std::chrono::milliseconds(250);
constexpr auto kBye = std::chrono::seconds(1);
// Requests that name one come from a manager that saw it a moment ago.
constexpr std::size_t kMaxEndedSessions = 16;

}  // namespace

LeaseAttacher::Impl::Impl(LeaseOptions options,
                          const RuntimeDir& dir,
                          Device& device,
                          const Geometry& geometry,
                          ArenaUser& user,
                          LeaseChanged on_change)
    : dir_(dir),
      options_(std::move(options)),
      owner_path_(dir.rank_socket(options_.identity.engine, options_.identity.rank.value, "lease")),
      rendezvous_path_(
          dir.rank_socket(options_.identity.engine, options_.identity.rank.value, "seek")),
      tag_(fmt::format("lease {}/{}", options_.identity.engine, options_.identity.rank.value)),
      device_(device),
      user_(user),
      on_change_(std::move(on_change)),
      assembly_(geometry, options_.identity.handles),
      rendezvous_(loop_,
                  options_.identity,
                  options_.timeouts.hello,
                  options_.transitions,
                  [this](Error error) { refuse_for_good(std::move(error)); }) {
  if (options_.identity.is_owner()) {
    throw Exception(KVFERRY_ERROR(kInvalidArgument, "{}: a {} with --cache-owner {} is the owner",
                                  tag_, to_string(options_.identity.self),
                                  to_string(options_.identity.cache_owner)));
  }
  // Before the first look: an owner that comes between look and watch would be missed.
  auto watch = NameWatch::open(owner_path_);
  if (!watch) throw Exception(std::move(watch).error());
  name_watch_.emplace(std::move(watch).value());
  loop_.watch(name_watch_->fd(), [this] {
    if (name_watch_->drain() && stage_ == Stage::kSearching) {
      search_backoff_ = {};
      try_connect();
    }
  });
  loop_.post([this] { try_connect(); });
  const auto runs = is_mover() ? OwnThread::Runs::kOurCode : OwnThread::Runs::kEngineCode;
  thread_.emplace("kvf-lease", runs, [this] { run_thread(); });
}

LeaseAttacher::Impl::~Impl() {
  loop_.post([this] { shut_down(); });
  // wait-brief: the lease's own thread; it drains (drain), says bye (kBye) and ends, limit
  // OwnThread::kEndsWithin
  thread_->wait_end();
  if (held_) {
    log_error("{}: epoch {} stays mapped until this process ends", tag_,
              held_->arena.epoch().value);
    keep_until_process_end(std::move(held_->arena));
    keep_until_process_end(std::move(ranges_));
  }
}

void LeaseAttacher::Impl::run_thread() {
  const bool ended_by_stop = loop_.run();
  KVFERRY_CHECK(ended_by_stop, fmt::format("{}: the lease thread failed", tag_));
}

void LeaseAttacher::Impl::shut_down() {
  if (held_) (void)let_go(Deadline::after(options_.timeouts.drain), "this process ends");
  shut_ = true;
  say_bye();
  close_connection();
  rendezvous_.close();
  loop_.unwatch(name_watch_->fd());
  changed();
  loop_.stop();
}

// A grant may be under way: the owner says which lease was the last, so that none outlives us. It
// holds nothing now, so it may wait for the answer. Without one, it declines what has come, and
// nothing more can: our end is shut, and an owner whose grant cannot leave takes it back.
void LeaseAttacher::Impl::say_bye() {
  if (!socket_ || held_ || stage_ == Stage::kHello) return;
  if (!lease::send(*socket_, lease::LeaseMessage::kBye, lease::LeaseBody{words_->released()})) {
    return;
  }
  const Deadline deadline = Deadline::after(kBye);
  // An owner that keeps sending something else is not waited for any longer than a silent one.
  while (!deadline.expired()) {
    // wait: the owner's answer to bye, with nothing mapped; deadline (kBye); the end of the
    // connection
    auto packet = socket_->receive(deadline);
    if (!packet) {
      log_info("{}: the owner did not answer our goodbye: {}", tag_, packet.error().message);
      break;
    }
    const auto incoming = lease::read_header(std::move(packet).value());
    if (!incoming) return;
    if (incoming->message != lease::LeaseMessage::kBye) {
      decline_grant(*incoming);
      continue;
    }
    const auto bye = lease::read_body<lease::LeaseBody>(*incoming, "Bye");
    if (bye && bye->lease > words_->released()) return_unopened(bye->lease);
    return;
  }
  ::shutdown(socket_->fd(), SHUT_RD);
  for (;;) {
    auto packet = socket_->try_receive();
    if (!packet || !packet->has_value()) return;
    const auto incoming = lease::read_header(std::move(**packet));
    if (!incoming) return;
    decline_grant(*incoming);
  }
}

// One part of it is enough to know the lease; the handles that came with it are closed unopened.
void LeaseAttacher::Impl::decline_grant(const lease::Incoming& incoming) {
  if (incoming.message != lease::LeaseMessage::kGrant) return;
  const auto part =
      lease::read_body<lease::GrantBody>(incoming, "Grant", incoming.packet.fds.size());
  if (!part) return;
  log_info("{}: lease {} on epoch {} given back unopened: this process ends", tag_,
           part->lease.value, part->epoch.value);
  record(Transition::kAttacherReturn, part->epoch, part->lease);
  acknowledge(part->lease);
}

Result<ClearOutcome> LeaseAttacher::Impl::detach(Epoch epoch, Deadline deadline) {
  const lease::Answer<ClearOutcome> answer;
  loop_.post([this, answer, epoch] {
    auto result = detach_now(epoch);
    changed();  // before the answer: the caller finds the new view
    answer.set(std::move(result));
  });
  // wait: own lease thread, which drains within drain; deadline, of the caller; nothing
  auto result = answer.wait(deadline);
  if (result) return std::move(*result);
  return KVFERRY_ERROR(
      kTimeout,
      "{}: epoch {} is still being drained at its caller's deadline and the detach "
      "goes on; ask again for its outcome",
      tag_, epoch.value);
}

// The drain has a deadline of its own: a caller in a hurry must not end a mover that is healthy.
Result<ClearOutcome> LeaseAttacher::Impl::detach_now(Epoch epoch) {
  if (epoch.value == 0 || epoch.value > words::kMaxEpoch) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: there is no epoch {}", tag_, epoch.value);
  }
  const TimePoint started = MonotonicClock::now();
  ClearOutcome outcome;
  outcome.epoch = epoch;
  outcome.before = device_.memory_info().value_or(MemoryInfo{});
  // A grant under way of an epoch that is now too small is given back when it comes.
  next_epoch_ = std::max(next_epoch_, Epoch{epoch.value + 1});
  {
    const std::lock_guard lock(view_mutex_);
    detached_ = std::max(detached_, epoch);
  }
  view_changed_.notify_all();
  if (held_ && held_->arena.epoch() <= epoch) {
    KVFERRY_TRY(let_go(Deadline::after(options_.timeouts.drain), "asked to by this process"));
    go_on();
  }
  outcome.after = device_.memory_info().value_or(MemoryInfo{});
  outcome.took =
      std::chrono::duration_cast<std::chrono::microseconds>(MonotonicClock::now() - started);
  return outcome;
}

Status LeaseAttacher::Impl::wait_mapped(Epoch at_least, Deadline deadline, const SessionId& of) {
  log_info("{}: waits at most {} ms for epoch {} or later to be mapped", tag_,
           std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining()).count(),
           at_least.value);
  Status mapped = await_mapped(at_least, deadline, of);
  log_info("{}: wait for epoch {} ended: {}", tag_, at_least.value,
           mapped ? std::string("mapped") : mapped.error().to_string());
  return mapped;
}

Status LeaseAttacher::Impl::await_mapped(Epoch at_least, Deadline deadline, const SessionId& of) {
  std::unique_lock lock(view_mutex_);
  const Wait wait{at_least, of, deaths_, sessions_, last_revoked_};
  for (;;) {
    if (view_.mapped && view_.epoch >= at_least && view_.phase == LeasePhase::kReady &&
        (of.is_zero() || view_.session == of)) {
      return ok();
    }
    if (std::optional<Error> over = why_over(wait)) return *std::move(over);
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "{}: epoch {} is not mapped: epoch {} {}; {}", tag_,
                           at_least.value, view_.epoch.value, to_string(view_.phase), view_.note);
    }
    // wait: an epoch to be mapped; deadline, of the caller; the owner's pidfd, revoke, refusal, the
    // end of this process
    (void)view_changed_.wait_until(lock, deadline.when());
  }
}

// Under the mutex.
bool LeaseAttacher::Impl::has_ended(const Wait& wait) const {
  if (wait.of.is_zero()) return deaths_ != wait.deaths;
  // A session that has come since is a later one.
  const bool replaced =
      sessions_ != wait.sessions && !view_.session.is_zero() && view_.session != wait.of;
  return replaced || std::find(ended_sessions_.begin(), ended_sessions_.end(), wait.of) !=
                         ended_sessions_.end();
}

// Under the mutex.
std::optional<Error> LeaseAttacher::Impl::why_over(const Wait& wait) const {
  if (view_.refused) return view_.refused;
  if (waits_cancelled_) {
    return KVFERRY_ERROR(kCancelled, "{}: this process ends; epoch {} is not waited for any more",
                         tag_, wait.at_least.value);
  }
  if (has_ended(wait)) {
    return KVFERRY_ERROR(kPeerDied, "{}: the owner died before epoch {} was mapped", tag_,
                         wait.at_least.value);
  }
  const auto revoked = [&](Epoch epoch) {
    return KVFERRY_ERROR(kRevoked, "{}: epoch {} was revoked before it was mapped here", tag_,
                         epoch.value);
  };
  const bool of_this_session = sessions_ == wait.sessions;
  if (last_revoked_ > (of_this_session ? wait.revoked : Epoch{}) &&
      last_revoked_ >= wait.at_least) {
    return revoked(last_revoked_);
  }
  if (wait.of.is_zero() || view_.session != wait.of) return std::nullopt;
  // Who names the session has been told that the epoch was ready: it is over if it is not.
  const bool is_over = view_.epoch >= wait.at_least && view_.phase != LeasePhase::kReady;
  if (is_over) return revoked(view_.epoch);
  if (detached_ >= wait.at_least) {
    return KVFERRY_ERROR(kRevoked,
                         "{}: epoch {} was let go of here when a clear began: clear it on its "
                         "owner, too, then re-init",
                         tag_, detached_.value);
  }
  return std::nullopt;
}

void LeaseAttacher::Impl::cancel_waits() noexcept {
  {
    const std::lock_guard lock(view_mutex_);
    waits_cancelled_ = true;
  }
  view_changed_.notify_all();
}

LeaseView LeaseAttacher::Impl::view() const {
  const std::lock_guard lock(view_mutex_);
  return view_;
}

// The doorbell wakes; this one only catches a lost one, and shows that the thread lives. Nothing
// rings when a clear ends: who holds nothing any more and waits for the next epoch looks as well.
void LeaseAttacher::Impl::belt() {
  if (belt_ != 0) {
    loop_.cancel(belt_);
    belt_ = 0;
  }
  if (shut_ || (!held_ && !socket_)) return;
  belt_ = loop_.after(kBelt, [this] {
    belt_ = 0;
    if (words_) words_->beat();
    check_word();
    changed();
  });
}

// Under the mutex.
void LeaseAttacher::Impl::session_ended(const SessionId& session) {
  ended_sessions_.push_back(session);
  if (ended_sessions_.size() > kMaxEndedSessions) ended_sessions_.pop_front();
}

void LeaseAttacher::Impl::changed() {
  LeaseView& draft = view_draft_;
  draft.session = session_;
  // Not an earlier one that its user does not let go of.
  draft.mapped = held_ && held_->accepted && held_->arena.epoch() == draft.epoch;
  draft.prepared_by = draft.mapped ? held_->prepared_by : LeaseId{};
  draft.group_blocks.clear();
  if (draft.mapped) {
    for (const GroupLayout& group : held_->arena.layout().groups) {
      draft.group_blocks.push_back(group.block_count);
    }
  }
  if (belt_ == 0) belt();
  {
    const std::lock_guard lock(view_mutex_);
    if (!draft.session.is_zero() && draft.session != last_session_) {
      // Two owners never live at once.
      session_ended(last_session_);
      last_session_ = draft.session;
      ++sessions_;
      last_revoked_ = Epoch{};
      detached_ = Epoch{};
    }
    if (draft.phase == LeasePhase::kRevoking) {
      last_revoked_ = std::max(last_revoked_, draft.epoch);
    }
    if (lease::same_view(view_, draft)) return;
    draft.number = view_.number + 1;
    view_ = draft;
  }
  view_changed_.notify_all();
  if (on_change_) on_change_(draft);
}

LeaseAttacher::LeaseAttacher(LeaseOptions options,
                             const RuntimeDir& dir,
                             Device& device,
                             const Geometry& geometry,
                             ArenaUser& user,
                             LeaseChanged on_change)
    : impl_(std::make_unique<Impl>(
          std::move(options), dir, device, geometry, user, std::move(on_change))) {}

LeaseAttacher::~LeaseAttacher() { forget_in_child(home_, impl_); }

Result<ClearOutcome> LeaseAttacher::detach(Epoch epoch, Deadline deadline) {
  return impl_->detach(epoch, deadline);
}

Status LeaseAttacher::wait_mapped(Epoch at_least, Deadline deadline, const SessionId& of) {
  return impl_->wait_mapped(at_least, deadline, of);
}

void LeaseAttacher::cancel_waits() noexcept { impl_->cancel_waits(); }

LeaseView LeaseAttacher::view() const { return impl_->view(); }

}  // namespace kvferry::ipc
