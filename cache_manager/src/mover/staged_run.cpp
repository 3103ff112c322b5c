// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/staged_run.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using ipc::ErrorCode;
using ipc::Status;

constexpr auto kConnectDeadline = std::chrono::seconds(2);
constexpr auto kDeviceCheck = std::chrono::milliseconds(250);
constexpr auto kAgentCheck = std::chrono::milliseconds(250);

// An eventfd's count since the last read; 0 when it was not signalled.
std::uint64_t take_count(int event_fd) noexcept {
  std::uint64_t count = 0;
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

void StagedRun::run() {
  prepare();
  while (!finished()) {
    stop_if_asked();
    start_chunks();
    if (!finished()) wait_for_progress();
  }
  if (lost_) await_lost_worker();
}

void StagedRun::prepare() {
  take_count(context_.copied.fd());
  if (const Status connected =
          context_.staging.ensure_connected(ipc::Deadline::after(kConnectDeadline));
      !connected) {
    abandon_staging(connected.error().code, connected.error().message);
  }
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
  const auto id = context_.staging.request(std::move(request));
  if (!id) {
    fail_chunk(work.chunk, id.error().code, id.error().message);
    free_slots_.push_back(work.slot);
    abandon_staging(id.error().code, id.error().message);
    return;
  }
  staging_.emplace(*id, work);
}

void StagedRun::copy(InFlight work) {
  Status moved =
      context_.enqueue(chunks_[work.chunk].runs, job_.arena->arena->staging_slot(work.slot));
  // The notification is enqueued even when the copy was not whole: what went out must be awaited.
  const Status notified = context_.stream.notify(context_.copied.fd());
  if (!notified) {
    fail_chunk(work.chunk, notified.error().code, notified.error().message);
    abandon_staging(notified.error().code, notified.error().message);
    return;
  }
  if (!moved) {
    fail_chunk(work.chunk, moved.error().code, moved.error().message);
    ipc::log_warn("job {}: copy failed: {}", job_.job.job.value, moved.error().to_string());
  }
  copying_.push_back(work);
}

void StagedRun::wait_for_progress() {
  std::array<pollfd, 3> waited{{{context_.copied.fd(), POLLIN, 0},
                                {context_.stopped.fd(), POLLIN, 0},
                                {staging_.empty() ? -1 : context_.staging.fd(), POLLIN, 0}}};
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
  if (ready <= 0) return;
  if (waited[1].revents != 0) context_.stopped.drain();
  if (waited[0].revents != 0) take_copies(take_count(context_.copied.fd()));
  if (waited[2].revents != 0) take_replies();
}

void StagedRun::take_copies(std::uint64_t count) {
  for (; count > 0 && !copying_.empty(); --count) {
    const InFlight work = copying_.front();
    copying_.pop_front();
    const StagedChunk& chunk = chunks_[work.chunk];
    const bool failed = result_.results[index_[chunk.items.front()]] != 0;
    if (failed) {
      free_slots_.push_back(work.slot);
    } else if (stores()) {
      result_.bytes += chunk.size_bytes;
      free_slots_.push_back(work.slot);
    } else if (abandoned_) {
      fail_chunk(work.chunk, ErrorCode::kRevoked, "staging was abandoned");
    } else {
      ask_worker(work);
    }
  }
}

void StagedRun::take_replies() {
  for (;;) {
    auto reply = context_.staging.try_receive();
    if (!reply) {
      abandon_staging(ErrorCode::kPeerDied, reply.error().message);
      return;
    }
    if (!reply->has_value()) return;
    const auto found = staging_.find((*reply)->id);
    if (found == staging_.end()) continue;  // of a hand-over that was abandoned earlier
    const InFlight work = found->second;
    staging_.erase(found);
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
  abandoned_ = true;
  lost_ = code != ErrorCode::kRevoked && !staging_.empty();
  for (const auto& [id, work] : staging_) fail_chunk(work.chunk, code, message);
  staging_.clear();
  // Closing tells the agent to drop what it has not begun.
  context_.staging.disconnect();
  for (; next_ < chunks_.size(); ++next_) fail_chunk(next_, code, message);
}

// What the lost worker was asked to do may still run: a closed socket is no proof. The blocks of a
// load, and the slots of the ring, are given on only after this.
void StagedRun::await_lost_worker() {
  const pid_t worker = context_.staging.agent().pid();
  const ipc::TimePoint started = ipc::MonotonicClock::now();
  bool logged = false;
  while (!lost_worker_is_done()) {
    if (context_.stop_reason() == ErrorCode::kRevoked) {
      ipc::log_info("job {}: the epoch ends, so do the hand-overs of worker pid {}",
                    job_.job.job.value, worker);
      return;
    }
    if (!logged) {
      ipc::log_info(
          "job {}: waits until nothing of worker pid {} can write any more: until its "
          "death is proven, its agent answers or the epoch ends",
          job_.job.job.value, worker);
      logged = true;
    }
    std::array<pollfd, 2> waited{
        {{context_.staging.agent().pidfd(), POLLIN, 0}, {context_.stopped.fd(), POLLIN, 0}}};
    ::poll(waited.data(), waited.size(), ipc::Deadline::after(kAgentCheck).poll_timeout_ms());
    if (waited[1].revents != 0) context_.stopped.drain();
  }
  if (!logged) return;
  ipc::log_info(
      "job {}: nothing of worker pid {} writes any more, after {} ms", job_.job.job.value, worker,
      std::chrono::duration_cast<std::chrono::milliseconds>(ipc::MonotonicClock::now() - started)
          .count());
}

bool StagedRun::lost_worker_is_done() {
  if (context_.staging.agent().has_died()) return true;
  // Alive: the same agent says when it is done. Another one could only be there after this one's
  // death.
  const Status greeted = context_.staging.ensure_connected(ipc::Deadline::after(kAgentCheck));
  if (!greeted) {
    ipc::log_debug("job {}: {}", job_.job.job.value, greeted.error().to_string());
  }
  return greeted.has_value();
}

void StagedRun::fail_chunk(std::size_t chunk, ErrorCode code, std::string_view message) {
  for (const std::size_t item : chunks_[chunk].items) {
    result_.results[index_[item]] = static_cast<std::uint8_t>(code);
  }
  if (result_.message.empty()) result_.message = message;
}

}  // namespace kvferry::cache_manager
