// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "operator_calls.hpp"

#include "operator_link.hpp"

#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;

constexpr ipc::Duration kAttemptTime = 250ms;

}  // namespace

OperatorCalls::OperatorCalls(ipc::EventLoop& loop, std::string runtime_dir, std::string instance)
    : loop_(loop), runtime_dir_(std::move(runtime_dir)), instance_(std::move(instance)) {}

OperatorCalls::~OperatorCalls() {
  loop_.cancel(timer_);
  drop_link();
}

ipc::Status OperatorCalls::connect() {
  if (link_ != nullptr) return ipc::ok();
  KVFERRY_ASSIGN(link_,
                 connect_operator(runtime_dir_, instance_, ipc::Deadline::after(kAttemptTime)));
  loop_.watch(link_->fd(), [this] { on_readable(); });
  return ipc::ok();
}

void OperatorCalls::drop_link() {
  if (link_ == nullptr) return;
  loop_.unwatch(link_->fd());
  link_.reset();
}

ipc::Status OperatorCalls::ask(ipc::MessageKind kind,
                               ipc::Bytes body,
                               ipc::Duration limit,
                               Done done) {
  KVFERRY_CHECK(done_ == nullptr, "one command at a time");
  KVFERRY_TRY(connect());
  ipc::Envelope envelope;
  envelope.kind = kind;
  envelope.request = link_->next_request();
  envelope.body = std::move(body);
  KVFERRY_TRY(link_->send(envelope));
  request_ = envelope.request;
  done_ = std::move(done);
  timer_ = loop_.after(limit, [this, kind] {
    drop_link();  // Its answer may still come, and nobody would know what to.
    finish(KVFERRY_ERROR(kTimeout, "the manager did not answer a {}", to_string(kind)));
  });
  return ipc::ok();
}

void OperatorCalls::on_readable() {
  while (link_ != nullptr) {
    auto received = link_->try_receive();
    if (!received || (!received->has_value() && link_->server_lost())) {
      drop_link();
      if (done_ != nullptr) finish(KVFERRY_ERROR(kPeerDied, "the manager died"));
      return;
    }
    if (!received->has_value()) return;
    ipc::Envelope& envelope = **received;
    if (done_ != nullptr && envelope.is_reply && envelope.request == request_) {
      finish(std::move(envelope));
    }
  }
}

void OperatorCalls::finish(ipc::Result<ipc::Envelope> answer) {
  loop_.cancel(timer_);
  request_ = {};
  std::exchange(done_, nullptr)(std::move(answer));
}

}  // namespace kvferry::cli
