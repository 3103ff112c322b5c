// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/generation_channel.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <utility>

namespace kvferry::worker {

using std::chrono_literals::operator""ms;

namespace {

constexpr ipc::Duration kConnectAgain = 25ms;
/// Connecting happens on the user's only thread.
constexpr ipc::Duration kGreetTime = 250ms;

}  // namespace

GenerationChannel::GenerationChannel(ipc::EventLoop& loop,
                                     ipc::RuntimeDir dir,
                                     std::string engine,
                                     std::string name,
                                     std::function<void()> on_up)
    : loop_(loop),
      dir_(std::move(dir)),
      engine_(std::move(engine)),
      name_(std::move(name)),
      on_up_(std::move(on_up)) {
  timer_ = loop_.after(ipc::Duration::zero(), [this] { connect(); });
}

GenerationChannel::~GenerationChannel() {
  loop_.cancel(timer_);
  if (link_ != nullptr) loop_.unwatch(link_->fd());
}

void GenerationChannel::connect_later() {
  timer_ = loop_.after(kConnectAgain, [this] { connect(); });
}

void GenerationChannel::connect() {
  ipc::ControlLink::Options options;
  // The scheduler lives with rank 0.
  options.registry_path = dir_.rank_socket(engine_, 0, ipc::RuntimeDir::kGenerate);
  options.control_path = dir_.rank_socket(engine_, 0, ipc::RuntimeDir::kGenerateControl);
  options.kind = ipc::ProcessKind::kEngine;
  options.incarnation = ipc::IncarnationId::random();
  options.name = name_;
  auto link = ipc::ControlLink::connect(std::move(options), ipc::Deadline::after(kGreetTime));
  if (!link) {
    ipc::log_debug("generation of engine {}: {}", engine_, link.error().to_string());
    connect_later();
    return;
  }
  link_ = std::move(*link);
  loop_.watch(link_->fd(), [this] { on_readable(); });
  on_up_();
}

ipc::Status GenerationChannel::submit(const ipc::Generate& request, Done done) {
  if (link_ == nullptr) {
    return KVFERRY_ERROR(kPeerDied, "engine {} has no scheduler at the moment: retry", engine_);
  }
  ipc::Envelope envelope;
  envelope.kind = ipc::MessageKind::kGenerate;
  envelope.request = link_->next_request();
  envelope.body = ipc::encode(request);
  KVFERRY_TRY(link_->send(envelope));
  pending_.emplace(envelope.request.value, std::move(done));
  return ipc::ok();
}

void GenerationChannel::on_readable() {
  while (link_ != nullptr) {
    auto received = link_->try_receive();
    if (!received) {
      ipc::log_debug("generation of engine {}: {}", engine_, received.error().to_string());
      on_lost();
      return;
    }
    if (!received->has_value()) {
      if (link_->server_lost()) on_lost();
      return;
    }
    const ipc::Envelope& envelope = **received;
    if (!envelope.is_reply) continue;
    auto answered = pending_.extract(envelope.request.value);
    if (answered.empty()) continue;
    if (envelope.error) {
      answered.mapped()(*envelope.error);
    } else {
      answered.mapped()(ipc::decode<ipc::GenerateReply>(envelope.body, "GenerateReply"));
    }
  }
}

// Nothing is written for whoever asks: a closed connection is all there is to know.
void GenerationChannel::on_lost() {
  loop_.unwatch(link_->fd());
  link_.reset();
  connect_later();
  for (auto& [request, done] : std::exchange(pending_, {})) {
    done(KVFERRY_ERROR(kPeerDied, "the scheduler of engine {} ended before it answered", engine_));
  }
}

}  // namespace kvferry::worker
