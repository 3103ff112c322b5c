// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/manager_connection.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "rank/refusal.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr auto kConnectDeadline = std::chrono::seconds(1);
constexpr auto kFirstRetry = std::chrono::milliseconds(20);
constexpr auto kLastRetry = std::chrono::milliseconds(500);
/// A predecessor that was killed may take this long to be gone.
constexpr auto kSuccession = std::chrono::seconds(3);

}  // namespace

ManagerConnection::ManagerConnection(EventLoop& loop,
                                     RankSelf self,
                                     const RuntimeDir& dir,
                                     Hooks hooks)
    : loop_(loop),
      self_(std::move(self)),
      dir_(dir),
      hooks_(std::move(hooks)),
      retry_(kFirstRetry) {}

ManagerConnection::~ManagerConnection() { close(); }

void ManagerConnection::close() {
  given_up_ = true;
  if (timer_ != 0) loop_.cancel(timer_);
  timer_ = 0;
  if (!link_) return;
  Envelope bye;
  bye.kind = MessageKind::kBye;
  if (const Status sent = link_->send(bye); !sent) {
    log_debug("bye not sent: {}", sent.error().to_string());
  }
  loop_.unwatch(link_->fd());
  link_.reset();
}

Status ManagerConnection::send(const Envelope& envelope) {
  if (!link_) {
    return KVFERRY_ERROR(kNoManager, "instance {}: no manager is connected; message {} not sent",
                         self_.config.instance, static_cast<int>(envelope.kind));
  }
  return link_->send(envelope);
}

void ManagerConnection::schedule_connect() {
  timer_ = loop_.after(retry_, [this] {
    timer_ = 0;
    try_connect();
  });
  retry_ = std::min<std::chrono::milliseconds>(retry_ * 2, kLastRetry);
}

void ManagerConnection::try_connect() {
  if (link_ || given_up_) return;
  if (hooks_.may_connect && !hooks_.may_connect()) {
    schedule_connect();
    return;
  }
  auto link = connect_and_register();
  if (!link) {
    on_connect_failed(link.error());
    return;
  }
  link_ = std::move(link).value();
  retry_ = kFirstRetry;
  waiting_logged_ = false;
  occupied_since_.reset();
  log_info("manager of instance {} connected, session {}", self_.config.instance,
           link_->welcome().manager_session.hex());
  loop_.watch(link_->fd(), [this] { drain(); });
  hooks_.on_connected(link_->welcome(), link_->take_pool());
  drain();
}

Result<std::unique_ptr<ControlLink>> ManagerConnection::connect_and_register() {
  const RankConfig& config = self_.config;
  ControlLink::Options options;
  options.registry_path = dir_.registry_socket();
  options.control_path = dir_.control_socket();
  options.kind = self_.kind;
  options.incarnation = config.incarnation;
  options.name = fmt::format("{} {}/{}", to_string(self_.kind), config.engine, config.rank.value);
  const Deadline deadline = Deadline::after(kConnectDeadline);
  KVFERRY_ASSIGN(auto link, ControlLink::connect(options, deadline));
  RankHello hello;
  hello.engine = config.engine;
  hello.rank = config.rank;
  hello.kind = self_.kind;
  hello.cache_owner = config.cache_owner;
  hello.handles = config.handles;
  hello.order = config.arena.order;
  hello.geometry = config.geometry;
  hello.device = self_.device.spec().to_string();
  const auto identity = self_.device.identity();
  // The slot alone: what else is known of it differs with what a process sees of the machine.
  hello.link = identity ? identity->link.substr(0, identity->link.find(',')) : hello.device;
  hello.store_rate = config.store_rate;
  hello.load_rate = config.load_rate;
  KVFERRY_TRY(self_.transitions.attempt(Transition::kPeerRegister, {}));
  KVFERRY_TRY(link->call<Empty>(MessageKind::kRankHello, hello, deadline));
  self_.transitions.record(Transition::kPeerRegistered, {.peer = link->welcome().manager_session});
  return link;
}

void ManagerConnection::on_connect_failed(const Error& error) {
  if (no_retry_can_mend(error.code)) {
    log_error("the manager refuses this {}: {}", to_string(self_.kind), error.to_string());
    hooks_.on_refused(error);
    return;
  }
  if (error.code == ErrorCode::kAlreadyExists) {
    const TimePoint now = MonotonicClock::now();
    if (!occupied_since_) {
      occupied_since_ = now;
      log_warn("{}; waiting {} s at most for its end", error.to_string(), kSuccession.count());
      waiting_logged_ = true;
    } else if (now - *occupied_since_ > kSuccession) {
      log_error("this {} is one too many: {}", to_string(self_.kind), error.to_string());
      hooks_.on_refused(error);
      return;
    }
  } else {
    occupied_since_.reset();
  }
  if (!waiting_logged_) {
    log_info("waiting for the manager of instance {}: {}", self_.config.instance,
             error.to_string());
    waiting_logged_ = true;
  }
  schedule_connect();
}

void ManagerConnection::drain() {
  while (link_) {
    auto received = link_->try_receive();
    if (!received) {
      if (link_->server_lost()) break;
      log_warn("message from the manager dropped: {}", received.error().to_string());
      continue;
    }
    if (!received->has_value()) break;
    hooks_.on_message(std::move(**received));
  }
  if (link_ && link_->server_lost()) {
    log_warn("the manager of instance {} is gone; reconnecting", self_.config.instance);
    loop_.unwatch(link_->fd());
    link_.reset();
    hooks_.on_lost();
    retry_ = kFirstRetry;
    schedule_connect();
  }
}

}  // namespace kvferry::ipc
