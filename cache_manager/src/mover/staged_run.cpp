// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/staged_run.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using ipc::ErrorCode;
using ipc::Status;
using ipc::Transition;

constexpr auto kConnectDeadline = std::chrono::seconds(2);

// An eventfd's count since the last read; 0 when it was not signalled.
std::uint64_t take_count(int event_fd) noexcept {
  std::uint64_t count = 0;
  // wait-none: an eventfd of ours, O_NONBLOCK
  return ::read(event_fd, &count, sizeof(count)) == sizeof(count) ? count : 0;
}

}  // namespace

void fail_items(ipc::MoverJobDone& result,
                std::span<const std::size_t> items,
                ErrorCode code,
                std::string_view message) {
  for (const std::size_t item : items) result.results[item] = static_cast<std::uint8_t>(code);
  if (result.message.empty()) result.message = message;
}

StagedRun::StagedRun(Context context,
                     const LaneJob& job,
                     std::span<const ipc::MoverItem> items,
                     std::span<const std::size_t> index,
                     ipc::MoverJobDone& result)
    : context_(std::move(context)), job_(job), index_(index), result_(result) {
  PlanLimits limits;
  limits.pool_piece_bytes = PoolMapping::kPieceBytes;
  const ipc::StagingRing& ring = job.arena->arena->layout().staging;
  chunks_ = plan_staged(job.arena->parts, items, ring.slot_bytes, limits);
  // Each lane has its half of the ring, so that loads and stores never wait for each other's slots.
  for (std::uint32_t slot = context_.lane; slot < ring.slots; slot += 2) {
    free_slots_.push_back(slot);
  }
}

Status StagedRun::run() {
  prepare();
  while (!finished()) {
    stop_if_asked();
    start_chunks();
    if (ipc::is_mutant("answers_before_its_copies")) copying_.clear();
    if (finished()) break;
    wait_for_progress();
    if (looked_ >= context_.device_hang) return device_hangs(looked_);
  }
  if (unnotified_) {
    if (const Status ended = wait_stream_idle(context_.stream, context_.device_hang); !ended) {
      if (ended.error().code == ErrorCode::kTimeout) return ended.error();
      ipc::log_error("job {}: {}", job_.job.job.value, ended.error().to_string());
    } else {
      context_.transitions.record(Transition::kMoverCopied, step(*unnotified_));
    }
  }
  return ipc::ok();
}

void StagedRun::prepare() {
  take_count(context_.copied.fd());
  const Status connected = context_.staging.ensure_connected(ipc::Deadline::after(kConnectDeadline),
                                                             context_.stopped.fd());
  if (connected) return context_.on_greeted();
  // A greeting that was asked for stays asked for: nothing is handed over before it.
  const ErrorCode code = context_.stop_reason().value_or(connected.error().code);
  for (; next_ < chunks_.size(); ++next_) fail_chunk(next_, code, connected.error().message);
}

void StagedRun::start_chunks() {
  while (!abandoned_ && next_ < chunks_.size() && !free_slots_.empty()) {
    const InFlight work{next_++, free_slots_.back()};
    free_slots_.pop_back();
    if (stores()) {
      ask_worker(work);
    } else {
      copy(work);
    }
  }
}

void StagedRun::ask_worker(InFlight work) {
  const StagedChunk& chunk = chunks_[work.chunk];
  ipc::StageRequest request;
  request.session = job_.arena->session;
  request.epoch = job_.arena->arena->epoch();
  request.kind = stores() ? ipc::StageKind::kGather : ipc::StageKind::kScatter;
  request.group = chunk.group;
  request.set = chunk.set;
  request.slot = work.slot;
  request.blocks = chunk.blocks;
  const std::uint64_t next = context_.staging.next_id();
  const Status planned = context_.transitions.attempt(Transition::kMoverAsk, step(next));
  const auto id = planned ? context_.staging.request(std::move(request))
                          : ipc::Result<std::uint64_t>(planned.error());
  if (!id) {
    context_.transitions.record(Transition::kMoverSeesHandOver, step(next));  // it never left
    fail_chunk(work.chunk, id.error().code, id.error().message);
    free_slots_.push_back(work.slot);
    abandon_staging(id.error().code, id.error().message);
    return;
  }
  staging_.emplace(*id, work);
}

void StagedRun::copy(InFlight work) {
  Status moved = context_.transitions.attempt(Transition::kMoverCopy, step(work.chunk));
  if (moved) {
    moved = context_.enqueue(chunks_[work.chunk].runs, job_.arena->arena->staging_slot(work.slot));
  }
  // The notification is enqueued even when the copy was not whole: what went out must be awaited.
  const Status notified = context_.stream.notify(context_.copied.fd());
  if (!notified) {
    unnotified_ = work.chunk;
    fail_chunk(work.chunk, notified.error().code, notified.error().message);
    abandon_staging(notified.error().code, notified.error().message);
    return;
  }
  if (!moved) {
    fail_chunk(work.chunk, moved.error().code, moved.error().message);
    ipc::log_warn("job {}: copy failed: {}", job_.job.job.value, moved.error().to_string());
  }
  copying_.push_back(work);
  context_.transitions.record(Transition::kMoverCopying, step(work.chunk));
}

void StagedRun::wait_for_progress() {
  const ipc::ProcessRef& agent = context_.staging.agent();
  std::array<pollfd, 4> waited{{{context_.copied.fd(), POLLIN, 0},
                                {context_.stopped.fd(), POLLIN, 0},
                                {staging_.empty() ? -1 : context_.staging.fd(), POLLIN, 0},
                                {staging_.empty() ? -1 : agent.pidfd(), POLLIN, 0}}};
  // wait: own copies (together at most kDeviceHang without progress) and the worker's hand-overs
  // (until the manager's job deadline kills this mover); kDeviceCheck; the worker's pidfd, cancel
  // and revoke
  const int ready =
      ::poll(waited.data(), waited.size(), ipc::Deadline::after(kDeviceCheck).poll_timeout_ms());
  // Looked at after every wait: a failed device wakes nobody, and copies that are reported as done
  // are ordered by the stream, not by the eventfd.
  if (const auto state = context_.stream.query(); !state) {
    while (!copying_.empty()) {
      fail_chunk(copying_.front().chunk, state.error().code, state.error().message);
      copying_.pop_front();
    }
    abandon_staging(state.error().code, state.error().message);
    return;
  }
  if (ready == 0 && !copying_.empty()) looked_ += kDeviceCheck;
  if (ready <= 0) return;
  if (waited[1].revents != 0) context_.stopped.drain();
  if (waited[0].revents != 0) take_copies(take_count(context_.copied.fd()));
  if (waited[2].revents != 0) take_replies();
  if (waited[3].revents != 0 && !staging_.empty()) {
    // A child that it had forked may keep the connection open.
    abandon_staging(ErrorCode::kPeerDied, fmt::format("worker (pid {}) died", agent.pid()));
  }
}

void StagedRun::take_copies(std::uint64_t count) {
  looked_ = std::chrono::milliseconds::zero();
  for (; count > 0 && !copying_.empty(); --count) {
    const InFlight work = copying_.front();
    copying_.pop_front();
    context_.transitions.record(Transition::kMoverCopied, step(work.chunk));
    const StagedChunk& chunk = chunks_[work.chunk];
    const bool failed = result_.results[index_[chunk.items.front()]] != 0;
    if (failed) {
      free_slots_.push_back(work.slot);
    } else if (stores()) {
      result_.bytes += chunk.size_bytes;
      free_slots_.push_back(work.slot);
    } else if (abandoned_) {
      fail_chunk(work.chunk, *abandoned_, "staging was abandoned");
    } else {
      ask_worker(work);
    }
  }
}

void StagedRun::take_replies() {
  for (;;) {
    auto reply = context_.staging.try_receive();
    if (!reply) {
      abandon_staging(reply.error().code, reply.error().message);
      return;
    }
    if (!reply->has_value()) return;
    const auto found = staging_.find((*reply)->id);
    KVFERRY_CHECK(found != staging_.end(), "a reply to a hand-over of another job");
    const InFlight work = found->second;
    staging_.erase(found);
    context_.transitions.record(Transition::kMoverSeesHandOver, step((*reply)->id));
    if ((*reply)->error) {
      fail_chunk(work.chunk, (*reply)->error->code, (*reply)->error->message);
      free_slots_.push_back(work.slot);
    } else if (stores()) {
      copy(work);
    } else {
      result_.bytes += chunks_[work.chunk].size_bytes;
      free_slots_.push_back(work.slot);
    }
  }
}

void StagedRun::stop_if_asked() {
  const auto reason = context_.stop_reason();
  if (!reason || abandoned_) return;
  if (*reason == ErrorCode::kCancelled) {
    // Only what has not started: the epoch goes on, so hand-overs are worth waiting for.
    for (; next_ < chunks_.size(); ++next_) fail_chunk(next_, *reason, "cancelled while it ran");
    return;
  }
  abandon_staging(*reason, "the epoch ends");
}

void StagedRun::abandon_staging(ErrorCode code, std::string_view message) {
  if (abandoned_) return;
  abandoned_ = code;
  if (!staging_.empty()) {
    proven_ = false;
    context_.transitions.record(Transition::kMoverAbandon, step(context_.lane));
    ipc::log_warn("job {}: {} hand-overs to the worker (pid {}) abandoned: {}", job_.job.job.value,
                  staging_.size(), context_.staging.agent().pid(), message);
  }
  for (const auto& [id, work] : staging_) fail_chunk(work.chunk, code, message);
  staging_.clear();
  // Closing tells the agent to drop what it has not begun.
  context_.staging.disconnect();
  for (; next_ < chunks_.size(); ++next_) fail_chunk(next_, code, message);
}

void StagedRun::fail_chunk(std::size_t chunk, ErrorCode code, std::string_view message) {
  for (const std::size_t item : chunks_[chunk].items) {
    result_.results[index_[item]] = static_cast<std::uint8_t>(code);
  }
  if (result_.message.empty()) result_.message = message;
}

}  // namespace kvferry::cache_manager
