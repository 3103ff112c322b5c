// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "client_link.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/look.hpp"
#include "kvferry/ipc/wire/store_messages.hpp"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

namespace kvferry::worker {

using ipc::Bytes;
using ipc::Envelope;
using ipc::MessageKind;
using ipc::RequestId;
using std::chrono_literals::operator""ms;

namespace {

constexpr ipc::Duration kAfterRefusal = 200ms;

/// Not if all that is amiss is that blocks got no room when they were offered.
bool has_failed(const ipc::JobDone& done) {
  bool is_whole = true;
  for (const std::uint8_t result : done.results) {
    const auto code = static_cast<ErrorCode>(result);
    const bool left_out = code == ErrorCode::kAlreadyExists || code == ErrorCode::kNoHostMemory ||
                          code == ErrorCode::kNotIdle;
    if (result != 0 && !left_out) return true;
    is_whole = is_whole && result == 0;
  }
  return !is_whole && !done.message.empty();
}

}  // namespace

ClientLink::ClientLink(ClientOptions options, ipc::RuntimeDir dir)
    : options_(std::move(options)),
      dir_(std::move(dir)),
      transitions_(ipc::TransitionLog::create_or_warn(
          dir_, {.role = "engine", .engine = options_.engine, .incarnation = incarnation_})),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      orders_(
          options_.scheduler,
          [this] { return std::uint64_t{jobs_.unfinished() + jobs_.untaken()}; },
          [this](const Envelope& reply) { send_reply(reply); }) {
  if (!epoll_.valid()) throw ipc::Exception(KVFERRY_ERRNO("epoll_create1"));
  watch(news_.fd());
}

ClientLink::~ClientLink() { close(); }

void ClientLink::watch(int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    ipc::log_error("{}", KVFERRY_ERRNO("client: cannot watch descriptor {}", fd).to_string());
  }
}

ipc::ControlLink::Options ClientLink::link_options() const {
  ipc::ControlLink::Options options;
  options.registry_path = dir_.registry_socket();
  options.control_path = dir_.control_socket();
  options.kind = ipc::ProcessKind::kEngine;
  options.incarnation = incarnation_;
  options.name = "engine " + options_.engine;
  return options;
}

Bytes ClientLink::hello() const {
  ipc::EngineHello hello;
  hello.engine = options_.engine;
  hello.name_space = options_.identity.name_space;
  hello.model = options_.identity.model;
  hello.weights = options_.identity.weights;
  hello.ranks = options_.ranks;
  hello.fingerprint = options_.identity.fingerprint;
  hello.schedules = orders_.has_scheduler();
  hello.paused = orders_.paused();
  hello.paused_by_release = orders_.paused_by_release();
  hello.name_space_key = options_.identity.name_space_key;
  hello.unit_blocks = options_.identity.unit_blocks;
  return ipc::encode(hello);
}

Status ClientLink::connect(Deadline deadline) {
  auto link = ipc::ControlLink::connect(link_options(), deadline);
  if (!link && link.error().code == ipc::ErrorCode::kNoManager) link = await_manager(deadline);
  if (!link) return std::move(link).error();
  adopt(*std::move(link));
  KVFERRY_TRY(transitions_.attempt(ipc::Transition::kPeerRegister, {}));
  KVFERRY_ASSIGN(const RequestId id, send(MessageKind::kEngineHello, hello(),
                                          {MessageKind::kEngineHello, true, {}, {}}));
  while (true) {
    if (first_greeting_) return *first_greeting_;
    if (link_ == nullptr || !pending_.contains(id.value)) {
      return KVFERRY_ERROR(kPeerDied, "the manager of instance {} ended before it answered",
                           dir_.instance());
    }
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "the manager of instance {} did not answer engine {}'s hello",
                           dir_.instance(), options_.engine);
    }
    wait(deadline);
  }
}

Result<std::unique_ptr<ipc::ControlLink>> ClientLink::await_manager(Deadline deadline) const {
  ipc::log_info("client: engine {} waits for a manager on instance {}, deadline in {} ms",
                options_.engine, dir_.instance(), deadline.poll_timeout_ms());
  Reconnector reconnector(link_options(), ipc::Duration::zero());
  while (true) {
    if (auto link = reconnector.take()) {
      ipc::log_info("client: engine {} found its manager", options_.engine);
      return link;
    }
    if (deadline.expired()) {
      return KVFERRY_ERROR(kNoManager,
                           "no manager came on instance {} ({}) by the deadline; start one with "
                           "'kvferry manager --instance {}'",
                           dir_.instance(), dir_.path().native(), dir_.instance());
    }
    pollfd entry{reconnector.fd(), POLLIN, 0};
    // wait: a manager to come; deadline, of the caller; one that came
    ::poll(&entry, 1, deadline.poll_timeout_ms());
  }
}

bool ClientLink::is_forked() {
  if (home_.is_here()) return false;
  if (!std::exchange(closed_, true)) {
    // Not closed: the descriptors, and the peer at their other ends, are the parent's, too.
    (void)reconnector_.release();
    (void)link_.release();
    pending_.clear();
    greeted_ = false;
    cache_.close();
  }
  return true;
}

ipc::Error ClientLink::closed_error() const {
  if (home_.is_here()) {
    return KVFERRY_ERROR(kCancelled, "the client of engine {} is closed", options_.engine);
  }
  return KVFERRY_ERROR(kCancelled,
                       "the client of engine {} is process {}'s, which forked this one: connect a "
                       "client of its own here",
                       options_.engine, home_.pid());
}

void ClientLink::close() {
  if (is_forked() || closed_) return;
  closed_ = true;
  reconnector_.reset();
  if (link_ != nullptr) {
    Envelope bye;
    bye.kind = MessageKind::kBye;
    bye.body = ipc::encode(ipc::Empty{});
    if (const auto sent = link_->send(bye); !sent) {
      ipc::log_debug("client: no bye: {}", sent.error().to_string());
    }
    link_.reset();
  }
  pending_.clear();
  greeted_ = false;
  cache_.close();
  orders_.lose_manager();
}

void ClientLink::adopt(std::unique_ptr<ipc::ControlLink> link) {
  link_ = std::move(link);
  manager_ = link_->welcome().manager_session;
  table_.reset();
  if (const std::uint64_t bytes = link_->welcome().table_bytes; bytes > 0) {
    if (auto view = ipc::PrefixTableView::map(link_->take_memory_fd(), bytes)) {
      table_ = std::move(view).value();
    } else {
      ipc::log_error("client: no looks at the manager's prefix table: {}",
                     view.error().to_string());
    }
  }
  watch(link_->fd());
}

void ClientLink::pump() {
  if (is_forked()) return;
  take_reconnected();
  while (link_ != nullptr) {
    auto received = link_->try_receive();
    if (!received) {
      if (link_->server_lost()) {
        lose(received.error().to_string());
        break;
      }
      ipc::log_warn("client: message dropped: {}", received.error().to_string());
      continue;
    }
    if (!received->has_value()) {
      if (link_->server_lost()) lose("its connection ended");
      break;
    }
    on_envelope(std::move(**received));
  }
  update_news();
}

void ClientLink::wait(Deadline deadline, ipc::Duration awake) {
  if (is_forked()) return;
  int fd = epoll_.get();
  if (news_signalled_) {
    // Completions that nobody has taken yet keep our own descriptor readable: wait for the others.
    fd = -1;
    if (reconnector_ != nullptr) fd = reconnector_->fd();
    if (link_ != nullptr) fd = link_->fd();
  }
  pollfd entry{fd, POLLIN, 0};
  const auto look = [&entry](int timeout_ms) {
    // wait: the manager's messages; timeout_ms, the caller's deadline; the manager's pidfd and
    // connection
    return ::poll(&entry, 1, timeout_ms) > 0;
  };
  if (!ipc::look_for(std::min(awake, deadline.remaining()), [&] { return look(0); })) {
    (void)look(deadline.poll_timeout_ms());
  }
  pump();
}

void ClientLink::serve_orders() {
  if (!is_forked()) orders_.serve();
}

void ClientLink::send_reply(const Envelope& reply) {
  if (link_ == nullptr) return;
  if (const Status sent = link_->send(reply); !sent) {
    ipc::log_warn("client: no answer to the manager: {}", sent.error().to_string());
  }
}

void ClientLink::update_news() {
  if (is_forked()) return;
  const bool wanted = jobs_.has_news() || cache_.has_events() || orders_.has_news();
  if (wanted == news_signalled_) return;
  news_signalled_ = wanted;
  if (wanted) {
    news_.signal();
  } else {
    news_.drain();
  }
}

void ClientLink::take_reconnected() {
  if (reconnector_ == nullptr) return;
  auto link = reconnector_->take();
  if (link == nullptr) return;
  reconnector_.reset();
  adopt(std::move(link));
  transitions_.record(ipc::Transition::kPeerRegister, {});
  const auto sent =
      send(MessageKind::kEngineHello, hello(), {MessageKind::kEngineHello, false, {}, {}});
  if (!sent) lose(sent.error().to_string());
}

void ClientLink::lose(std::string_view why) {
  ipc::log_warn("client: engine {} lost its manager ({}); {} jobs unfinished, reconnecting",
                options_.engine, why, jobs_.unfinished());
  link_.reset();  // Closes its descriptor, which leaves the epoll set by itself.
  greeted_ = false;
  cache_.lose_manager();
  orders_.lose_manager();
  jobs_.orphan_all(cache_.state().ranks);
  for (auto pending = pending_.begin(); pending != pending_.end();) {
    // A request() that waits finds out by the missing entry.
    pending = pending_.erase(pending);
  }
  if (was_greeted_ && !closed_) reconnect(ipc::Duration::zero());
}

void ClientLink::reconnect(ipc::Duration after) {
  reconnector_ = std::make_unique<Reconnector>(link_options(), after);
  watch(reconnector_->fd());
}

Status ClientLink::check_connected() {
  if (is_forked() || closed_) return closed_error();
  if (link_ == nullptr || !greeted_) {
    return KVFERRY_ERROR(kNoManager, "no manager on instance {}; reconnecting, retry later",
                         dir_.instance());
  }
  return ipc::ok();
}

Result<RequestId> ClientLink::send(MessageKind kind, Bytes body, Pending pending) {
  Envelope envelope;
  envelope.kind = kind;
  envelope.request = RequestId{++last_request_};
  envelope.body = std::move(body);
  KVFERRY_TRY(link_->send(envelope));
  pending.sent = ipc::MonotonicClock::now();
  pending_.emplace(envelope.request.value, std::move(pending));
  return envelope.request;
}

std::optional<ipc::TimePoint> ClientLink::unanswered_since() {
  pump();
  const auto oldest = std::find_if(pending_.begin(), pending_.end(), [](const auto& request) {
    return request.second.job.has_value();
  });
  if (oldest == pending_.end()) return std::nullopt;
  return oldest->second.sent;
}

Result<Bytes> ClientLink::request(MessageKind kind, Bytes body, Deadline deadline) {
  pump();
  KVFERRY_TRY(check_connected());
  KVFERRY_ASSIGN(const RequestId id, send(kind, std::move(body), {kind, true, {}, {}}));
  while (true) {
    const auto found = pending_.find(id.value);
    if (found == pending_.end()) {
      return KVFERRY_ERROR(kPeerDied,
                           "the manager of instance {} was lost before it answered; "
                           "whether the request took effect is not known",
                           dir_.instance());
    }
    if (found->second.reply) {
      Envelope reply = std::move(*found->second.reply);
      pending_.erase(found);
      if (reply.error) return std::move(*reply.error);
      return std::move(reply.body);
    }
    if (deadline.expired()) {
      found->second.wanted = false;
      return KVFERRY_ERROR(kTimeout,
                           "the manager of instance {} did not answer in time; the "
                           "request may still take effect",
                           dir_.instance());
    }
    if (obeys_while_waiting_) serve_orders();
    wait(deadline);
  }
}

Status ClientLink::send_only(MessageKind kind, Bytes body) {
  pump();
  KVFERRY_TRY(check_connected());
  KVFERRY_TRY(send(kind, std::move(body), {kind, false, {}, {}}));
  return ipc::ok();
}

Status ClientLink::tell(MessageKind kind, Bytes body) {
  pump();
  KVFERRY_TRY(check_connected());
  Envelope envelope;
  envelope.kind = kind;
  envelope.body = std::move(body);
  return link_->send(envelope);
}

Result<const ipc::PrefixTableView*> ClientLink::table() {
  KVFERRY_TRY(check_connected());
  if (state().refused) return *state().refused;
  if (rules().empty()) {
    return KVFERRY_ERROR(kNotReady, "engine {} has no worker yet: wait until it is ready",
                         options_.engine);
  }
  if (!table_) {
    return KVFERRY_ERROR(kNoManager, "the manager of instance {} has no prefix table",
                         dir_.instance());
  }
  return &*table_;
}

Status ClientLink::submit(MessageKind kind,
                          JobId job,
                          Bytes body,
                          std::span<const DeviceBlock> blocks) {
  KVFERRY_TRY(check_connected());
  const ipc::TransitionFields step{.job = job, .detail = blocks.size()};
  KVFERRY_TRY(transitions_.attempt(ipc::Transition::kEngineSubmit, step));
  KVFERRY_TRY(send(kind, std::move(body), {kind, false, job, {}}));
  jobs_.add(job, manager_, blocks);
  transitions_.record(ipc::Transition::kEngineSubmitted, step);
  ++stats_.jobs_submitted;
  pump();
  return ipc::ok();
}

void ClientLink::on_envelope(Envelope envelope) {
  if (envelope.is_reply) {
    on_reply(std::move(envelope));
  } else if (envelope.kind == MessageKind::kEngineState) {
    if (const Status taken = cache_.take(envelope.body); taken) {
      settle_orphans();
    } else {
      ipc::log_error("client: state of engine {} dropped: {}", options_.engine,
                     taken.error().to_string());
    }
  } else if (envelope.kind == MessageKind::kSchedule) {
    orders_.take(std::move(envelope));
  } else if (envelope.kind == MessageKind::kJobDone) {
    on_job_done(envelope);
  } else if (envelope.kind == MessageKind::kBye) {
    lose("it said bye");
  } else {
    ipc::log_warn("client: message kind {} is not for an engine; dropped",
                  static_cast<unsigned>(envelope.kind));
  }
}

void ClientLink::on_reply(Envelope envelope) {
  const auto found = pending_.find(envelope.request.value);
  if (found == pending_.end() || found->second.kind != envelope.kind) {
    ipc::log_warn("client: reply to request {} that is not waiting for one; dropped",
                  envelope.request.value);
    return;
  }
  if (found->second.kind == MessageKind::kEngineHello && found->second.wanted) {
    // Now, not when connect() looks: states that come right behind it are newer.
    pending_.erase(found);
    first_greeting_ = on_hello_reply(envelope);
    return;
  }
  if (found->second.wanted) {
    found->second.reply = std::move(envelope);
    return;
  }
  const Pending pending = std::move(found->second);
  pending_.erase(found);
  if (pending.kind == MessageKind::kEngineHello) {
    if (const Status greeted = on_hello_reply(envelope); !greeted) {
      on_hello_refused(greeted.error());
      return;
    }
    ++stats_.reconnects;
    ipc::log_info("client: engine {} is connected to manager {} again", options_.engine,
                  manager_.hex());
  } else if (pending.kind == MessageKind::kReserveStore && !envelope.error) {
    give_up_late_reservations(envelope);
  } else if (pending.job && envelope.error) {
    if (jobs_.finish_all_items(*pending.job, envelope.error->code, envelope.error->message)) {
      ++stats_.jobs_completed;
      ++stats_.jobs_failed;
    }
  } else if (envelope.error) {
    ipc::log_warn("client: {}", envelope.error->to_string());
  }
}

// Its caller was told that it timed out: nobody else knows of these slots.
void ClientLink::give_up_late_reservations(const Envelope& envelope) {
  const auto reply = ipc::decode<ipc::ReserveStoreReply>(envelope.body, "ReserveStoreReply");
  if (!reply) return;
  ipc::AbandonStore late;
  for (const ipc::ReservedSlot& slot : reply->slots) {
    if (slot.outcome == ipc::ReserveOutcome::kReserved) late.slots.push_back(slot.slot);
  }
  if (late.slots.empty()) return;
  if (const auto sent = send_only(MessageKind::kAbandonStore, ipc::encode(late)); !sent) {
    ipc::log_warn("client: {} late reservations are not given up: {}", late.slots.size(),
                  sent.error().to_string());
  }
}

void ClientLink::on_hello_refused(const ipc::Error& error) {
  ipc::log_warn("client: the new manager refused engine {}: {}; trying again", options_.engine,
                error.to_string());
  link_.reset();
  orders_.lose_manager();
  reconnect(kAfterRefusal);
}

Status ClientLink::on_hello_reply(const Envelope& envelope) {
  if (envelope.error) return *envelope.error;
  KVFERRY_TRY(cache_.greet(envelope.body, !was_greeted_));
  settle_orphans();
  greeted_ = was_greeted_ = true;
  transitions_.record(ipc::Transition::kPeerRegistered, {.peer = manager_});
  if (jobs_.has_orphans()) count_settled(jobs_.settle_greeted(manager_));
  return ipc::ok();
}

void ClientLink::settle_orphans() {
  if (!jobs_.has_orphans()) return;
  const CacheState& state = cache_.state();
  count_settled(jobs_.settle_orphans(manager_, state.offload_ready, state.ranks));
}

void ClientLink::count_settled(std::size_t jobs) noexcept {
  stats_.jobs_completed += jobs;
  stats_.jobs_failed += jobs;
}

void ClientLink::on_job_done(const Envelope& envelope) {
  auto done = ipc::decode<ipc::JobDone>(envelope.body, "JobDone");
  if (!done) {
    ipc::log_error("client: completion dropped: {}", done.error().to_string());
    return;
  }
  const bool failed = has_failed(*done);
  if (!jobs_.finish(done->job, std::move(done->results), std::move(done->message), done->bytes)) {
    ipc::log_warn("client: completion of unknown job {} dropped", done->job.value);
    return;
  }
  ++stats_.jobs_completed;
  if (failed) ++stats_.jobs_failed;
}

}  // namespace kvferry::worker
