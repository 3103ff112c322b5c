// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/lifecycle.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "operator_link.hpp"

#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kConnectTime = 250ms;
constexpr ipc::Duration kRetry = 200ms;
/// The manager answers by its own deadline; this is for an answer that never comes.
constexpr ipc::Duration kReplyMargin = 3s;
constexpr ipc::Duration kRecoverTime = 60s;

double ms_since(ipc::TimePoint start) {
  return std::chrono::duration<double, std::milli>(ipc::MonotonicClock::now() - start).count();
}

}  // namespace

LifecycleDriver::LifecycleDriver(ipc::EventLoop& loop,
                                 Options options,
                                 ReplayCounters& counters,
                                 ClearMemoryLog& memory,
                                 Hooks hooks)
    : loop_(loop),
      options_(std::move(options)),
      counters_(counters),
      memory_(memory),
      hooks_(std::move(hooks)) {}

LifecycleDriver::~LifecycleDriver() {
  loop_.cancel(timer_);
  drop_link();
}

void LifecycleDriver::start_cycle() {
  if (phase_ != Phase::kIdle) {
    ++owed_;
    return;
  }
  phase_ = Phase::kClearing;
  send_clear();
}

ipc::Status LifecycleDriver::connect() {
  if (link_ != nullptr) return ipc::ok();
  KVFERRY_ASSIGN(link_, connect_operator(options_.runtime_dir, options_.instance,
                                         ipc::Deadline::after(kConnectTime)));
  loop_.watch(link_->fd(), [this] { on_readable(); });
  return ipc::ok();
}

void LifecycleDriver::drop_link() {
  if (link_ == nullptr) return;
  loop_.unwatch(link_->fd());
  link_.reset();
}

template <typename Request>
ipc::Status LifecycleDriver::ask(ipc::MessageKind kind, const Request& request) {
  KVFERRY_TRY(connect());
  ipc::Envelope envelope;
  envelope.kind = kind;
  envelope.request = link_->next_request();
  envelope.body = ipc::encode(request);
  KVFERRY_TRY(link_->send(envelope));
  request_ = envelope.request;
  asked_at_ = ipc::MonotonicClock::now();
  loop_.cancel(timer_);
  timer_ = loop_.after(request.deadline + kReplyMargin, [this, kind] {
    drop_link();
    recover(KVFERRY_ERROR(kTimeout, "the manager did not answer a {}",
                          kind == ipc::MessageKind::kClear ? "clear" : "reinit"));
  });
  return ipc::ok();
}

void LifecycleDriver::send_clear() {
  ipc::ClearRequest request;
  request.engine = options_.engine;
  request.host = options_.host;
  memory_.before_clear();
  if (const auto sent = ask(ipc::MessageKind::kClear, request); !sent) recover(sent.error());
}

void LifecycleDriver::send_reinit() {
  ipc::ReinitRequest request;
  request.engine = options_.engine;
  if (const auto sent = ask(ipc::MessageKind::kReinit, request); !sent) recover(sent.error());
}

void LifecycleDriver::on_readable() {
  while (link_ != nullptr) {
    auto received = link_->try_receive();
    if (!received || (!received->has_value() && link_->server_lost())) {
      drop_link();
      if (phase_ == Phase::kClearing || phase_ == Phase::kReiniting) {
        recover(KVFERRY_ERROR(kPeerDied, "the manager died"));
      }
      return;
    }
    if (!received->has_value()) return;
    const ipc::Envelope& envelope = **received;
    if (envelope.is_reply && envelope.request == request_) on_reply(envelope);
  }
}

void LifecycleDriver::on_reply(const ipc::Envelope& reply) {
  loop_.cancel(timer_);
  request_ = {};
  if (phase_ == Phase::kClearing) {
    auto clear = ipc::decode<ipc::ClearReply>(reply.body, "ClearReply");
    const bool quarantined = reply.error && reply.error->code == ipc::ErrorCode::kQuarantined;
    if (reply.error && !quarantined) return recover(*reply.error);
    if (!clear && !quarantined) return recover(clear.error());
    bool held = quarantined;
    if (clear) {
      for (const ipc::RankOutcome& rank : clear->ranks) {
        held = held || rank.outcome.kind == ipc::ClearKind::kQuarantined;
      }
    }
    if (held) ++counters_.quarantined;
    ++counters_.clears;
    counters_.clear_ms.push_back(ms_since(asked_at_));
    if (clear) memory_.after_clear(*clear, held);
    phase_ = Phase::kReiniting;
    send_reinit();
    return;
  }
  if (reply.error) return recover(*reply.error);
  ++counters_.reinits;
  counters_.reinit_ms.push_back(ms_since(asked_at_));
  finish();
}

void LifecycleDriver::recover(const ipc::Error& why) {
  loop_.cancel(timer_);
  request_ = {};
  if (phase_ != Phase::kRecovering) {
    ++counters_.failed_cycles;
    recovering_since_ = ipc::MonotonicClock::now();
    ipc::log_info("a clear or reinit did not go through: {}; bringing the cache back",
                  why.to_string());
  }
  phase_ = Phase::kRecovering;
  if (ipc::MonotonicClock::now() - recovering_since_ > kRecoverTime) {
    hooks_.on_hopeless(
        KVFERRY_ERROR(kTimeout, "the cache did not come back within 60 s: {}", why.to_string()));
    return;
  }
  recover_later();
}

void LifecycleDriver::recover_later() {
  timer_ = loop_.after(kRetry, [this] {
    if (hooks_.is_ready()) {
      finish();
    } else {
      send_reinit();
    }
  });
}

void LifecycleDriver::finish() {
  loop_.cancel(timer_);
  phase_ = Phase::kIdle;
  if (owed_ == 0) return;
  --owed_;
  start_cycle();
}

}  // namespace kvferry::cli
