// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/transfer_lane.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"
#include "mover/staged_run.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using ipc::Deadline;
using ipc::ErrorCode;
using ipc::MoverItem;
using ipc::MoverJobDone;
using ipc::Status;
using ipc::Transition;

}  // namespace

TransferLane::TransferLane(ipc::Device& device,
                           Options options,
                           Done done,
                           std::function<void(const ipc::Error&)> device_failed)
    : device_(device),
      options_(std::move(options)),
      done_(std::move(done)),
      device_failed_(std::move(device_failed)),
      staging_(options_.staging),
      held_(staging_, [this](MoverJobDone result) { finish(std::move(result)); }) {
  auto stream = device.make_stream(ipc::StreamPriority::kNormal);
  if (!stream) throw ipc::Exception(std::move(stream).error());
  stream_ = std::move(stream).value();
  const bool stores = options_.direction == ipc::CopyDirection::kDeviceToHost;
  thread_.emplace(stores ? "kvf-store" : "kvf-load", ipc::OwnThread::Runs::kOurCode,
                  [this] { run(); });
}

TransferLane::~TransferLane() {
  revoke(ErrorCode::kCancelled);
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  wanted_.signal();
  // wait-brief: the lane's own thread; it was revoked and told to stop, limit
  // OwnThread::kEndsWithin
  thread_->wait_end();
  if (holding_) {
    ipc::log_warn("ending with answers unproven: this mover's death takes their place");
  }
}

void TransferLane::submit(LaneJob job) {
  {
    const std::lock_guard lock(mutex_);
    const auto place = std::find_if(queue_.begin(), queue_.end(), [&job](const LaneJob& queued) {
      return queued.job.priority < job.job.priority;
    });
    queue_.insert(place, std::move(job));
  }
  changed_.notify_all();
  wanted_.signal();
}

void TransferLane::cancel(ipc::JobId job) {
  std::optional<LaneJob> cancelled;
  {
    const std::lock_guard lock(mutex_);
    if (running_ && running_job_ == job) {
      stop_running_.add(ErrorCode::kCancelled);
      stopped_.signal();  // it may wait for the worker
      return;
    }
    const auto found = std::find_if(queue_.begin(), queue_.end(),
                                    [job](const LaneJob& queued) { return queued.job.job == job; });
    if (found == queue_.end()) return;
    cancelled = std::move(*found);
    queue_.erase(found);
  }
  MoverJobDone result;
  result.job = job;
  result.results.assign(cancelled->job.items.size(),
                        static_cast<std::uint8_t>(ErrorCode::kCancelled));
  result.message = "cancelled before it started";
  finish(std::move(result));
}

void TransferLane::revoke(ErrorCode code) {
  std::deque<LaneJob> revoked;
  {
    const std::lock_guard lock(mutex_);
    revoked.swap(queue_);
    if (running_) stop_running_.add(code);
  }
  stopped_.signal();
  for (const LaneJob& job : revoked) {
    MoverJobDone result;
    result.job = job.job.job;
    result.results.assign(job.job.items.size(), static_cast<std::uint8_t>(code));
    result.message = fmt::format("{} before it started", ipc::to_string(code));
    finish(std::move(result));
  }
  changed_.notify_all();
}

Status TransferLane::wait_idle(Deadline deadline) {
  std::unique_lock lock(mutex_);
  // wait: running job of the lane, whose hand-overs are abandoned; deadline, of the drain; the
  // failure of the device
  const bool idle = changed_.wait_until(
      lock, deadline.when(), [this] { return stream_failure_ || (!running_ && queue_.empty()); });
  if (stream_failure_) return *stream_failure_;
  if (idle) return ipc::ok();
  return KVFERRY_ERROR(kTimeout, "copies in flight did not end in time");
}

bool TransferLane::idle() {
  const std::lock_guard lock(mutex_);
  return !running_ && queue_.empty() && !holding_ && !stream_failure_;
}

void TransferLane::run() {
  for (;;) {
    LaneJob job;
    wanted_.drain();
    {
      std::unique_lock lock(mutex_);
      // wait-idle: jobs; submit() or the end of the lane; thread kvf-store, kvf-load
      if (!holding_) changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_ || stream_failure_) return;
      if (queue_.empty()) {
        lock.unlock();
        held_.pursue(wanted_.fd());
        release_held();
        continue;
      }
      job = take_next();
      running_ = true;
      running_job_ = job.job.job;
      stop_running_.reset();
      stopped_.drain();
    }
    execute(job);
    // The arena goes before the lane calls itself idle: a detach may unmap right then. The pool
    // goes after: the last user of a lost manager's pool unpins it, and a detach must not wait for
    // that.
    const std::shared_ptr<PoolMapping> pool = std::move(job.pool);
    job = LaneJob();
    {
      const std::lock_guard lock(mutex_);
      running_ = false;
      holding_ = !held_.empty();
    }
    changed_.notify_all();
    release_held();
  }
}

// The first of the highest priority, but every kFairShare-th time the oldest: a stream of better
// jobs must not hold one back for ever.
LaneJob TransferLane::take_next() {
  auto next = queue_.begin();
  if (++taken_ % kFairShare == 0) {
    next = std::min_element(queue_.begin(), queue_.end(), [](const LaneJob& a, const LaneJob& b) {
      return a.submitted < b.submitted;
    });
  }
  LaneJob job = std::move(*next);
  queue_.erase(next);
  return job;
}

// A job's greeting may have brought the proof for those before it.
void TransferLane::release_held() {
  held_.release_if_proven();
  const std::lock_guard lock(mutex_);
  holding_ = !held_.empty();
}

void TransferLane::execute(LaneJob& job) {
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  options_.transitions.record(Transition::kMoverStart, {.job = job.job.job});
  MoverJobDone result;
  result.job = job.job.job;
  result.results.assign(job.job.items.size(), 0);
  result.queued = std::chrono::duration_cast<std::chrono::microseconds>(start - job.submitted);

  std::vector<MoverItem> items;
  std::vector<std::size_t> index;  // items[i] is job item index[i]
  for (std::size_t i = 0; i < job.job.items.size(); ++i) {
    const MoverItem& item = job.job.items[i];
    if (const auto wrong = check_item(item, job.arena->arena->layout(), job.arena->parts,
                                      job.pool->size_bytes())) {
      result.results[i] = static_cast<std::uint8_t>(wrong->code);
      if (result.message.empty()) result.message = wrong->message;
      continue;
    }
    items.push_back(item);
    index.push_back(i);
  }
  bool proven = true;
  Status ran;
  if (job.arena->strategy == CopyStrategy::kStaged) {
    StagedRun::Context context{options_.direction, options_.lane, *stream_, copied_, stopped_,
                               staging_, options_.transitions,
                               [this, &job](std::span<const CopyRun> runs, ipc::DevicePtr slot) {
                                 return enqueue(job, runs, slot, true);
                               },
                               [this, &job] { return stop_reason(job.job.job); },
                               // Not at the job's end: that may be long after.
                               [this] { release_held(); }, options_.device_hang};
    StagedRun staged(std::move(context), job, items, index, result);
    ran = staged.run();
    proven = staged.proven();
  } else {
    ran = run_direct(job, items, index, result);
  }
  result.copied =
      std::chrono::duration_cast<std::chrono::microseconds>(ipc::MonotonicClock::now() - start);
  if (const auto state = stream_->query(); !state) {
    fail_stream(job.job.job, state.error());
  } else if (!ran) {
    fail_stream(job.job.job, ran.error());
  } else if (proven || ipc::is_mutant("answers_what_it_abandoned")) {
    finish(std::move(result));
  } else {
    held_.add(std::move(result));
  }
}

// An answer would give on blocks that a copy may still write: our death gives it.
void TransferLane::fail_stream(ipc::JobId job, const ipc::Error& error) {
  ipc::log_error("job {} stays unanswered, its copies cannot be shown to have ended: {}", job.value,
                 error.to_string());
  {
    const std::lock_guard lock(mutex_);
    stream_failure_ = error;
  }
  changed_.notify_all();
  device_failed_(error);
}

Status TransferLane::run_direct(LaneJob& job,
                                std::span<const MoverItem> items,
                                std::span<const std::size_t> index,
                                MoverJobDone& result) {
  PlanLimits limits;
  limits.pool_piece_bytes = PoolMapping::kPieceBytes;
  ipc::TransitionFields part{.job = job.job.job};
  for (const CopyChunk& chunk : plan_direct(job.arena->parts, items, limits)) {
    ++part.detail;
    Status moved;
    if (const auto reason = stop_reason(job.job.job)) {
      moved = KVFERRY_ERROR(kRevoked, "{} while it ran", ipc::to_string(*reason));
      fail_items(result, index.subspan(chunk.first_item, chunk.item_count), *reason,
                 moved.error().message);
      continue;
    }
    moved = options_.transitions.attempt(Transition::kMoverCopy, part);
    if (moved) moved = enqueue(job, chunk.runs, ipc::DevicePtr{}, false);
    if (moved) options_.transitions.record(Transition::kMoverCopying, part);
    // Even after a failed enqueue: earlier runs of the chunk may be on their way.
    const Status waited = wait_stream(*stream_, copied_, options_.device_hang);
    if (!waited && waited.error().code == ErrorCode::kTimeout) return waited.error();
    if (waited) options_.transitions.record(Transition::kMoverCopied, part);
    if (moved && !waited) moved = waited;
    if (!moved) {
      ipc::log_warn("job {}: copy failed: {}", job.job.job.value, moved.error().to_string());
      fail_items(result, index.subspan(chunk.first_item, chunk.item_count), moved.error().code,
                 moved.error().message);
      continue;
    }
    result.bytes += chunk.size_bytes;
  }
  return ipc::ok();
}

Status TransferLane::enqueue(const LaneJob& job,
                             std::span<const CopyRun> runs,
                             ipc::DevicePtr slot,
                             bool staged) {
  std::vector<ipc::CopyOp> ops;
  ops.reserve(runs.size());
  for (const CopyRun& run : runs) {
    KVFERRY_ASSIGN(void* host, job.pool->pinned(run.pool_offset, run.size_bytes));
    const ipc::DevicePtr base = staged ? slot : job.arena->arena->segment(run.segment);
    ops.push_back({host, base + run.device_offset, run.size_bytes});
  }
  const bool each = job.arena->strategy == CopyStrategy::kMemcpy || ops.size() == 1;
  return stream_->copy(options_.direction, ops,
                       each ? ipc::CopyMode::kEach : ipc::CopyMode::kBatch);
}

std::optional<ErrorCode> TransferLane::stop_reason(ipc::JobId job) {
  const std::lock_guard lock(mutex_);
  return running_job_ == job ? stop_running_.get() : std::nullopt;
}

void TransferLane::finish(MoverJobDone result) {
  ipc::log_debug("job {} done: {} items, {} bytes, queued {} us, copied {} us{}{}",
                 result.job.value, result.results.size(), result.bytes, result.queued.count(),
                 result.copied.count(), result.message.empty() ? "" : ", ", result.message);
  const auto failed = std::count_if(result.results.begin(), result.results.end(),
                                    [](std::uint8_t code) { return code != 0; });
  options_.transitions.record(Transition::kMoverAnswer,
                              {.job = result.job, .detail = static_cast<std::uint64_t>(failed)});
  done_(std::move(result));
}

}  // namespace kvferry::cache_manager
