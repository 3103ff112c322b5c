// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/sampler.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "run/anonymous_memory.hpp"

#include <unistd.h>

#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;

/// The manager answers between two messages, at once, unless it is stopped.
constexpr ipc::Duration kStatusLimit = 5s;

}  // namespace

Sampler::Sampler(ipc::EventLoop& loop, std::string runtime_dir, std::string instance, Hooks hooks)
    : loop_(loop),
      hooks_(std::move(hooks)),
      calls_(loop, std::move(runtime_dir), std::move(instance)) {}

void Sampler::start() {
  started_at_ = ipc::MonotonicClock::now();
  take();
}

void Sampler::on_request_done(std::uint64_t requests) {
  if (posted_ || !list_.is_due(requests) || !calls_.is_idle()) return;
  posted_ = true;
  // When the engine is done with what it is in the middle of.
  loop_.post([this, alive = alive_] {
    if (!*alive) return;
    posted_ = false;
    if (calls_.is_idle()) take();
  });
}

void Sampler::take() {
  RunSample sample;
  sample.requests = hooks_.requests_done();
  sample.seconds = std::chrono::duration<double>(ipc::MonotonicClock::now() - started_at_).count();
  const auto look = [&sample](const std::string& name, pid_t pid) {
    if (const auto kib = anonymous_kib(pid)) sample.anonymous_kib.emplace(name, *kib);
  };
  for (const auto& [name, pid] : hooks_.processes()) look(name, pid);
  look("replay", ::getpid());
  list_.add(std::move(sample));
  if (!hooks_.manager_there()) return;
  const auto sent =
      calls_.ask(ipc::MessageKind::kStatus, ipc::encode(ipc::Empty{}), kStatusLimit,
                 [this](const ipc::Result<ipc::Envelope>& answer) { on_status(answer); });
  if (!sent) ipc::log_debug("a sample without the pool: {}", sent.error().to_string());
}

void Sampler::on_status(const ipc::Result<ipc::Envelope>& answer) {
  if (!answer) return;
  const auto status = ipc::decode<ipc::StatusReply>(answer->body, "StatusReply");
  if (!status) return;
  if (const auto pool = pool_of_status(status->json)) list_.set_pool(*pool);
}

void Sampler::finish(ipc::Deadline deadline) {
  while (!calls_.is_idle() && !deadline.expired()) loop_.run_once(deadline);
  if (!calls_.is_idle()) return;
  take();
  while (!calls_.is_idle() && !deadline.expired()) loop_.run_once(deadline);
}

}  // namespace kvferry::cli
