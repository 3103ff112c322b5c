// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/lifecycle.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kRetry = 200ms;
/// The manager answers by its own deadline; this is for an answer that never comes.
constexpr ipc::Duration kLifecycleMargin = 3s;
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
      hooks_(std::move(hooks)),
      calls_(loop, options_.runtime_dir, options_.instance) {}

LifecycleDriver::~LifecycleDriver() { loop_.cancel(timer_); }

void LifecycleDriver::start_cycle() {
  if (phase_ != Phase::kIdle) {
    ++owed_;
    return;
  }
  phase_ = Phase::kClearing;
  send_clear();
}

template <typename Request>
void LifecycleDriver::ask(ipc::MessageKind kind, const Request& request) {
  const auto answered = [this](const ipc::Result<ipc::Envelope>& reply) {
    if (reply) {
      on_reply(*reply);
    } else {
      recover(reply.error());
    }
  };
  asked_at_ = ipc::MonotonicClock::now();
  const auto sent =
      calls_.ask(kind, ipc::encode(request), request.deadline + kLifecycleMargin, answered);
  if (!sent) recover(sent.error());
}

void LifecycleDriver::send_clear() {
  ipc::ClearRequest request;
  request.engine = options_.engine;
  request.host = options_.host;
  memory_.before_clear();
  ask(ipc::MessageKind::kClear, request);
}

void LifecycleDriver::send_reinit() {
  ipc::ReinitRequest request;
  request.engine = options_.engine;
  ask(ipc::MessageKind::kReinit, request);
}

void LifecycleDriver::on_reply(const ipc::Envelope& reply) {
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
