// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/client.hpp"

#include "client_impl.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::worker {

using std::chrono_literals::operator""s;

namespace {

constexpr ipc::Duration kNoticeable = 1s;

std::vector<DeviceBlock> blocks_of(GroupId group, std::span<const BlockId> blocks) {
  std::vector<DeviceBlock> made;
  made.reserve(blocks.size());
  for (const BlockId block : blocks) made.push_back({group, block});
  return made;
}

/// Says that a wait has become noticeable, once, and how it ended if so.
class WaitLog {
 public:
  explicit WaitLog(std::string what) : what_(std::move(what)) {}
  void tick(Deadline deadline) {
    if (logged_ || ipc::MonotonicClock::now() - started_ < kNoticeable) return;
    logged_ = true;
    ipc::log_info("client: waits for {}, deadline in {} ms", what_, deadline.poll_timeout_ms());
  }
  void end(std::string_view how) const {
    if (!logged_) return;
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
        ipc::MonotonicClock::now() - started_);
    ipc::log_info("client: waited {} ms for {}: {}", took.count(), what_, how);
  }
  /// When to look again.
  [[nodiscard]] Deadline next(Deadline deadline) const {
    return logged_ ? deadline : deadline.earlier(Deadline::at(started_ + kNoticeable));
  }

 private:
  std::string what_;
  ipc::TimePoint started_ = ipc::MonotonicClock::now();
  bool logged_ = false;
};

}  // namespace

Client::Client() = default;

Client::~Client() {
  ipc::forget_in_child(home_, impl_);
  // Not close(): a scheduler that owns its client may be half-way through its own end.
  if (impl_ != nullptr) impl_->link.close();
}

Result<std::unique_ptr<Client>> Client::connect(ClientOptions options, Deadline deadline) {
  if (options.ranks == 0 || options.engine.empty()) {
    return KVFERRY_ERROR(kInvalidArgument, "engine \"{}\" with {} ranks; both must be given",
                         options.engine, options.ranks);
  }
  KVFERRY_ASSIGN(auto dir, ipc::RuntimeDir::open(options.runtime_dir, options.instance));
  std::unique_ptr<Client> client(new Client);
  try {
    client->impl_ = std::make_unique<Impl>(std::move(options), std::move(dir));
  } catch (const ipc::Exception& exception) {
    return exception.error();
  }
  KVFERRY_TRY(client->impl_->link.connect(deadline));
  return client;
}

void Client::close() {
  if (impl_ == nullptr) return;
  impl_->link.close();
  impl_->link.serve_orders();  // Requests that were held for a while run again.
}

int Client::fd() const noexcept { return impl_->link.fd(); }

const CacheState& Client::state() const noexcept {
  impl_->link.acknowledge_generation();
  return impl_->link.state();
}

Status Client::wait_ready(bool offload, Deadline deadline) {
  ClientLink& link = impl_->link;
  WaitLog log(fmt::format("engine {} to be ready", link.options().engine));
  link.pump();
  while (true) {
    const CacheState& state = link.state();
    if (state.manager_connected && state.phase == CachePhase::kReady &&
        (!offload || state.offload_ready)) {
      link.acknowledge_generation();
      log.end("ready");
      return ipc::ok();
    }
    if (state.refused) {
      log.end("refused");
      return *state.refused;
    }
    if (link.closed()) {
      return link.closed_error();
    }
    if (deadline.expired()) {
      log.end("deadline");
      return KVFERRY_ERROR(
          kTimeout,
          "engine {} is not ready: manager {}, phase {}, offload {}; are the workers and "
          "movers of all {} ranks running?",
          link.options().engine, state.manager_connected ? "connected" : "absent",
          static_cast<unsigned>(state.phase), state.offload_ready ? "ready" : "not ready",
          link.options().ranks);
    }
    log.tick(deadline);
    // wait: the cache to be ready; deadline, of the caller, in steps of kNoticeable; news of the
    // manager, whose death counts as such
    link.wait(log.next(deadline));
  }
}

std::vector<CacheEvent> Client::events() {
  ClientLink& link = impl_->link;
  if (link.is_forked()) return {};
  link.pump();
  std::vector<CacheEvent> events = link.take_events();
  link.update_news();
  return events;
}

std::vector<Completion> Client::poll(std::size_t max) {
  ClientLink& link = impl_->link;
  if (link.is_forked()) return {};
  link.pump();
  // Taken out before the first call: a callee may wait for other blocks, or submit.
  for (const auto& released : link.jobs().take_released()) released();
  // Before completions are taken: those of the last poll have been handled by now.
  link.serve_orders();
  std::vector<Completion> completions = link.jobs().take(max);
  if (!completions.empty()) link.look_at_orders_again();
  link.update_news();
  return completions;
}

Result<std::vector<Completion>> Client::wait(std::span<const JobId> jobs, Deadline deadline) {
  ClientLink& link = impl_->link;
  if (link.is_forked()) return link.closed_error();
  WaitLog log(fmt::format("{} jobs", jobs.size()));
  link.pump();
  for (const JobId job : jobs) {
    if (!link.jobs().is_unfinished(job) && !link.jobs().has_completion(job)) {
      return KVFERRY_ERROR(kNotFound, "job {} was never submitted, or its completion was taken",
                           job.value);
    }
  }
  while (true) {
    const auto left = std::count_if(jobs.begin(), jobs.end(),
                                    [&link](JobId job) { return link.jobs().is_unfinished(job); });
    if (left == 0) break;
    if (link.closed()) {
      return KVFERRY_ERROR(kCancelled, "the client is closed; {} jobs run on", left);
    }
    if (deadline.expired()) {
      log.end("deadline");
      return KVFERRY_ERROR(kTimeout, "{} of {} jobs are unfinished; they run on, wait or cancel",
                           left, jobs.size());
    }
    log.tick(deadline);
    // wait: jobs; deadline, of the caller, in steps of kNoticeable; news of the manager, whose
    // death counts as such
    link.wait(log.next(deadline), link.options().awake);
  }
  std::vector<Completion> completions;
  completions.reserve(jobs.size());
  for (const JobId job : jobs) {
    if (auto completion = link.jobs().take_job(job)) completions.push_back(std::move(*completion));
  }
  link.update_news();
  log.end("done");
  return completions;
}

Status Client::wait_answered(Deadline deadline) {
  ClientLink& link = impl_->link;
  if (link.is_forked() || link.closed()) return link.closed_error();
  WaitLog log("what the manager owes an answer to");
  while (const auto since = link.unanswered_since()) {
    if (deadline.expired()) {
      log.end("deadline");
      const auto owed = std::chrono::duration_cast<std::chrono::milliseconds>(
          ipc::MonotonicClock::now() - *since);
      return KVFERRY_ERROR(kTimeout, "the manager has taken no job for {} ms", owed.count());
    }
    log.tick(deadline);
    // wait: the manager's answers; deadline, of the caller, in steps of kNoticeable; news of the
    // manager, whose death counts as such
    link.wait(log.next(deadline));
  }
  link.update_news();
  log.end("answered");
  return ipc::ok();
}

bool Client::release_when_done(GroupId group,
                               std::span<const BlockId> blocks,
                               std::function<void()> released) {
  impl_->link.pump();
  return impl_->link.jobs().release_when_done(blocks_of(group, blocks), std::move(released));
}

const ClientStats& Client::stats() const noexcept { return impl_->link.stats(); }

}  // namespace kvferry::worker
