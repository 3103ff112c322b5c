// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"
#include "lease/attacher_impl.hpp"
#include "lease/hello.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace kvferry::ipc {
namespace {

using lease::Incoming;
using lease::LeaseMessage;
using std::chrono::milliseconds;

constexpr milliseconds kFirstBackoff{10};
constexpr milliseconds kLongestBackoff{1000};
constexpr milliseconds kConnect{200};
constexpr int kPacketsPerRound = 16;

milliseconds next_backoff(milliseconds now) {
  return now == milliseconds{} ? kFirstBackoff : std::min(2 * now, kLongestBackoff);
}

}  // namespace

void LeaseAttacher::Impl::search(std::string why) {
  KVFERRY_CHECK(!held_, "a search for an owner while memory of the last one is mapped");
  close_connection();
  stage_ = Stage::kSearching;
  if (!why.empty()) note(std::move(why));
  schedule_search();
}

void LeaseAttacher::Impl::schedule_search() {
  search_backoff_ = next_backoff(search_backoff_);
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = loop_.after(search_backoff_, [this] {
    timer_ = 0;
    try_connect();
    changed();
  });
}

void LeaseAttacher::Impl::try_connect() {
  if (stage_ != Stage::kSearching || shut_) return;
  auto socket = PacketSocket::connect(owner_path_, Deadline::after(kConnect));
  if (!socket) {
    if (lease::is_permanent(socket.error())) return refuse_for_good(std::move(socket).error());
    if (!search_logged_) {
      search_logged_ = true;
      log_info("{}: waits for an owner ({})", tag_, socket.error().message);
      note("waits for an owner");
    }
    if (socket.error().code == ErrorCode::kNotFound) rendezvous_.open(rendezvous_path_);
    if (stage_ == Stage::kSearching) schedule_search();
    return changed();
  }
  if (const Status said = say_hello(std::move(socket).value()); !said) {
    search(said.error().to_string());
  }
  changed();
}

Status LeaseAttacher::Impl::say_hello(PacketSocket socket) {
  KVFERRY_ASSIGN(ProcessRef owner, socket.peer());
  KVFERRY_ASSIGN(lease::AttacherWords words,
                 lease::AttacherWords::create(options_.identity.incarnation));
  const int fd = words.fd();
  KVFERRY_TRY(options_.transitions.attempt(
      Transition::kHelloSay, {.detail = lease::compared_as_greeter(options_.identity)}));
  KVFERRY_TRY(
      lease::send(socket, LeaseMessage::kHello, lease::HelloBody{options_.identity}, {&fd, 1}));
  socket_.emplace(std::move(socket));
  owner_ = std::move(owner);
  words_.emplace(std::move(words));
  assembly_.reset();
  stage_ = Stage::kHello;
  loop_.watch(socket_->fd(), [this] { on_packets(); });
  loop_.watch(owner_.pidfd(), [this] {
    lose_owner(fmt::format("owner pid {} died", owner_.pid()));
    changed();
  });
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = loop_.after(options_.timeouts.hello, [this] {
    timer_ = 0;
    log_warn("{}: owner pid {} did not answer our hello within {} ms", tag_, owner_.pid(),
             options_.timeouts.hello.count());
    search(fmt::format("owner pid {} does not answer", owner_.pid()));
    changed();
  });
  if (is_mutant("asks_unwelcomed")) request_epoch();
  return ok();
}

void LeaseAttacher::Impl::on_packets() {
  for (int i = 0; i < kPacketsPerRound && socket_; ++i) {
    auto packet = socket_->try_receive();
    if (packet && !packet->has_value()) break;
    if (!packet) {
      lose_owner(packet.error().code == ErrorCode::kPeerDied
                     ? fmt::format("owner pid {} closed its connection", owner_.pid())
                     : packet.error().to_string());
      break;
    }
    auto incoming = lease::read_header(std::move(**packet));
    const Status handled =
        incoming ? on_message(std::move(incoming).value()) : Status(incoming.error());
    if (!handled) {
      log_warn("{}: owner pid {} dropped: {}", tag_, owner_.pid(), handled.error().to_string());
      lose_owner(handled.error().to_string());
      if (lease::is_permanent(handled.error())) refuse_for_good(handled.error());
      break;
    }
  }
  check_word();
  changed();
}

Status LeaseAttacher::Impl::on_message(Incoming incoming) {
  switch (incoming.message) {
    case LeaseMessage::kWelcome: return on_welcome(std::move(incoming));
    case LeaseMessage::kRefused: {
      if (stage_ != Stage::kHello) break;
      KVFERRY_ASSIGN(lease::RefusedBody body,
                     lease::read_body<lease::RefusedBody>(incoming, "Refused"));
      on_refused(std::move(body.error));
      return ok();
    }
    case LeaseMessage::kGrant: {
      if (stage_ != Stage::kWaiting && stage_ != Stage::kIdle) break;
      KVFERRY_ASSIGN(std::optional<lease::Grant> grant, assembly_.add(std::move(incoming)));
      if (grant && grant->lease <= words_->released()) {
        return KVFERRY_ERROR(kProtocol, "lease {} is granted, all up to {} are released",
                             grant->lease.value, words_->released().value);
      }
      if (grant && is_mover() && !grant->prepared) {
        // Movers run no kernels: the worker that owns the memory has zeroed it before it grants.
        return KVFERRY_ERROR(kProtocol, "lease {} grants a mover epoch {}, which nobody has zeroed",
                             grant->lease.value, grant->epoch.value);
      }
      if (grant) on_grant(std::move(*grant));
      return ok();
    }
    case LeaseMessage::kRevoke:
      // A doorbell: the caller looks at the word after this.
      KVFERRY_TRY(lease::read_body<lease::RevokeBody>(incoming, "Revoke"));
      return ok();
    case LeaseMessage::kHello:
    case LeaseMessage::kAttach:
    case LeaseMessage::kReleased:
    case LeaseMessage::kPrepared:
    case LeaseMessage::kBye: break;
  }
  return KVFERRY_ERROR(kProtocol, "message {} is not an owner's to send at this point",
                       static_cast<int>(incoming.message));
}

Status LeaseAttacher::Impl::on_welcome(Incoming incoming) {
  if (stage_ != Stage::kHello) {
    return KVFERRY_ERROR(kProtocol, "a second welcome of pid {}", owner_.pid());
  }
  KVFERRY_ASSIGN(const lease::WelcomeBody welcome,
                 lease::read_body<lease::WelcomeBody>(incoming, "Welcome", 1));
  KVFERRY_TRY(lease::compare_identities(welcome.owner.identity, owner_.pid(), options_.identity,
                                        ::getpid()));
  KVFERRY_ASSIGN(lease::OwnerWordsView words,
                 lease::OwnerWordsView::map(incoming.packet.fds.front(), welcome.session));
  owner_words_.emplace(std::move(words));
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = 0;
  rendezvous_.close();
  // An attacher that was killed there has left it: with an owner, nobody takes the name over.
  (void)NameLock::remove_if_stale(rendezvous_path_);
  if (session_ != welcome.session) {
    session_ = welcome.session;
    next_epoch_ = Epoch{1};
  }
  record(Transition::kHelloWelcomed, {});
  // Nothing is mapped here, so a grant that was lost on its way is let go of already.
  if (welcome.last_lease > words_->released()) return_unopened(welcome.last_lease);
  search_logged_ = false;
  log_info("{}: connected to owner pid {}, session {}", tag_, owner_.pid(), session_.hex());
  note({});
  stage_ = Stage::kIdle;
  request_after_backoff();
  return ok();
}

void LeaseAttacher::Impl::on_refused(Error error) {
  log_error("{}: owner pid {} refuses us: {}", tag_, owner_.pid(), error.to_string());
  const bool for_good = lease::is_permanent(error);
  tell_refusal(for_good ? Transition::kHelloRefused : Transition::kHelloTurnedAway, error);
  if (for_good && !is_mutant("retries_when_refused")) return refuse_for_good(std::move(error));
  search(error.to_string());
}

void LeaseAttacher::Impl::refuse_for_good(Error error) {
  if (held_ || stage_ == Stage::kRefused) return;
  log_error("{}: gives up: {}", tag_, error.to_string());
  tell_refusal(Transition::kHelloGivesUp, error);
  close_connection();
  rendezvous_.close();
  stage_ = Stage::kRefused;
  note(error.to_string());
  view_draft_.refused = std::move(error);
  changed();
}

// Closed or dead: letting go is right in both cases, and the first duty.
void LeaseAttacher::Impl::lose_owner(const std::string& why) {
  if (!socket_ || owner_lost_) return;
  log_info("{}: {}", tag_, why);
  const bool holds = held_ && !let_go(Deadline::after(options_.timeouts.drain), why);
  loop_.unwatch(owner_.pidfd());
  ProcessRef departed = std::move(owner_);
  const SessionId session = session_;
  if (holds) {
    owner_lost_ = true;
    loop_.unwatch(socket_->fd());
  } else {
    search(why);
  }
  follow(std::move(departed), session);
}

// Its end of file comes before its death can be proven: whoever waits for an epoch is told when the
// proof is there, however long that takes.
void LeaseAttacher::Impl::follow(ProcessRef departed, const SessionId& session) {
  loop_.unwatch(departed_.pidfd());
  departed_ = std::move(departed);
  departed_session_ = session;
  if (departed_.has_died()) return on_departed_death();
  loop_.watch(departed_.pidfd(), [this] {
    on_departed_death();
    changed();
  });
}

void LeaseAttacher::Impl::on_departed_death() {
  loop_.unwatch(departed_.pidfd());
  options_.transitions.record(Transition::kAttacherSeesDeath, {.session = departed_session_});
  log_info("{}: owner pid {} is dead", tag_, departed_.pid());
  if (stage_ == Stage::kSearching) note(fmt::format("owner pid {} died", departed_.pid()));
  departed_ = ProcessRef();
  {
    const std::lock_guard lock(view_mutex_);
    ++deaths_;
    session_ended(departed_session_);
  }
  view_changed_.notify_all();
}

void LeaseAttacher::Impl::close_connection() {
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = 0;
  if (socket_) {
    loop_.unwatch(socket_->fd());
    loop_.unwatch(owner_.pidfd());
  }
  socket_.reset();
  owner_ = ProcessRef();
  owner_words_.reset();
  if (!held_) words_.reset();
  assembly_.reset();
  owner_lost_ = false;
  session_ = SessionId{};
  view_draft_.epoch = Epoch{};
  view_draft_.phase = LeasePhase::kVacant;
}

void LeaseAttacher::Impl::request_epoch() {
  if (!socket_ || held_ || shut_) return;
  Status sent = attempt(Transition::kAttacherAsk, next_epoch_);
  if (sent) sent = lease::send(*socket_, LeaseMessage::kAttach, lease::AttachBody{next_epoch_});
  if (!sent) return lose_owner(sent.error().to_string());
  record(Transition::kAttacherAsked, next_epoch_);
  stage_ = Stage::kWaiting;
  log_info("{}: waits for owner pid {} to grant epoch {} or later", tag_, owner_.pid(),
           next_epoch_.value);
}

void LeaseAttacher::Impl::request_after_backoff() {
  if (import_backoff_ == milliseconds{}) return request_epoch();
  stage_ = Stage::kIdle;
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = loop_.after(import_backoff_, [this] {
    timer_ = 0;
    request_epoch();
    changed();
  });
}

}  // namespace kvferry::ipc
