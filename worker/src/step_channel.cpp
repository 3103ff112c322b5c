// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/step_channel.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <fmt/format.h>

#include <utility>
#include <vector>

namespace kvferry::worker {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kRetry = 25ms;
/// Connecting happens on the engine's only thread.
constexpr ipc::Duration kConnectTime = 250ms;
/// A worker that closed its connection is ending: when its death should have followed.
constexpr ipc::Duration kDeathTime = 2s;

template <typename Reply>
std::function<void(ipc::Result<ipc::Envelope>)> decoded(
    std::string what, std::function<void(ipc::Result<Reply>)> done) {
  return [what = std::move(what), done = std::move(done)](const ipc::Result<ipc::Envelope>& reply) {
    if (!reply) {
      done(reply.error());
    } else {
      done(ipc::decode<Reply>(reply->body, what));
    }
  };
}

}  // namespace

StepChannel::StepChannel(ipc::EventLoop& loop,
                         ipc::RuntimeDir dir,
                         std::string engine,
                         ipc::Rank rank,
                         std::string name,
                         Hooks hooks)
    : loop_(loop),
      dir_(std::move(dir)),
      engine_(std::move(engine)),
      rank_(rank),
      name_(std::move(name)),
      hooks_(std::move(hooks)) {
  timer_ = loop_.after(ipc::Duration::zero(), [this] { connect(); });
}

StepChannel::~StepChannel() {
  loop_.cancel(timer_);
  if (link_ != nullptr) loop_.unwatch(link_->fd());
  if (departed_ != nullptr) loop_.unwatch(departed_->server().pidfd());
}

void StepChannel::connect_later() {
  timer_ = loop_.after(kRetry, [this] { connect(); });
}

void StepChannel::connect() {
  ipc::ControlLink::Options options;
  options.registry_path = dir_.rank_socket(engine_, rank_.value, "step");
  options.control_path = dir_.rank_socket(engine_, rank_.value, ipc::RuntimeDir::kStepControl);
  options.kind = ipc::ProcessKind::kEngine;
  options.incarnation = ipc::IncarnationId::random();
  options.name = name_;
  const ipc::Deadline deadline = ipc::Deadline::after(kConnectTime);
  auto link = ipc::ControlLink::connect(std::move(options), deadline);
  if (!link) {
    ipc::log_debug("steps of rank {}: {}", rank_.value, link.error().to_string());
    connect_later();
    return;
  }
  const auto hello =
      (*link)->call<ipc::Empty>(ipc::MessageKind::kStepHello, ipc::Empty{}, deadline);
  if (!hello) {
    ipc::log_debug("steps of rank {}: {}", rank_.value, hello.error().to_string());
    connect_later();
    return;
  }
  link_ = std::move(*link);
  loop_.watch(link_->fd(), [this] { on_readable(); });
  hooks_.on_up();
}

ipc::Status StepChannel::send(const ipc::Step& step, Done done) {
  return ask(ipc::MessageKind::kStep, ipc::encode(step),
             decoded<ipc::StepReply>("StepReply", std::move(done)));
}

ipc::Status StepChannel::send(const ipc::Decode& pass, DecodeDone done) {
  return ask(ipc::MessageKind::kDecode, ipc::encode(pass),
             decoded<ipc::DecodeReply>("DecodeReply", std::move(done)));
}

ipc::Status StepChannel::ask_memory(MemoryDone done) {
  return ask(ipc::MessageKind::kWorkerMemory, ipc::encode(ipc::Empty{}),
             decoded<ipc::WorkerMemory>("WorkerMemory", std::move(done)));
}

ipc::Status StepChannel::ask(ipc::MessageKind kind, ipc::Bytes body, Answered answered) {
  if (link_ == nullptr) {
    return KVFERRY_ERROR(kPeerDied, "rank {} has no worker at the moment", rank_.value);
  }
  ipc::Envelope envelope;
  envelope.kind = kind;
  envelope.request = link_->next_request();
  envelope.body = std::move(body);
  KVFERRY_TRY(link_->send(envelope));
  pending_.emplace(envelope.request.value, std::move(answered));
  return ipc::ok();
}

void StepChannel::on_readable() {
  while (link_ != nullptr) {
    auto received = link_->try_receive();
    if (!received) {
      if (link_->server_lost()) {
        on_lost();
        return;
      }
      drop_unknown(received.error());
      continue;
    }
    if (!received->has_value()) {
      if (link_->server_lost()) on_lost();
      return;
    }
    ipc::Envelope& envelope = **received;
    const auto found = pending_.find(envelope.request.value);
    if (!envelope.is_reply || found == pending_.end()) continue;
    const Answered answered = std::move(found->second);
    pending_.erase(found);
    if (envelope.error) {
      answered(*envelope.error);
    } else {
      answered(std::move(envelope));
    }
  }
}

// Whose answer it was nobody knows, so all that wait are told.
void StepChannel::drop_unknown(const ipc::Error& error) {
  ipc::log_warn("steps of rank {}: {}", rank_.value, error.to_string());
  for (auto& [request, answered] : std::exchange(pending_, {})) answered(error);
}

void StepChannel::on_lost() {
  loop_.unwatch(link_->fd());
  departed_ = std::move(link_);
  const ipc::ProcessRef& worker = departed_->server();
  if (worker.has_died()) return on_death();
  // A closed connection proves nothing: a worker that is alive may still write to its blocks.
  loop_.watch(worker.pidfd(), [this] { on_death(); });
  timer_ = loop_.after(kDeathTime, [this] {
    ipc::log_warn(
        "the worker of rank {} (pid {}) closed its step channel and lives on; waits for its end",
        rank_.value, departed_->server().pid());
  });
}

void StepChannel::on_death() {
  ipc::log_debug("the worker of rank {} (pid {}) is dead", rank_.value, departed_->server().pid());
  loop_.unwatch(departed_->server().pidfd());
  loop_.cancel(timer_);
  departed_.reset();
  for (auto& [request, answered] : std::exchange(pending_, {})) {
    answered(
        KVFERRY_ERROR(kPeerDied, "the worker of rank {} died before it answered", rank_.value));
  }
  hooks_.on_lost();
  connect_later();
}

}  // namespace kvferry::worker
