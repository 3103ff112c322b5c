// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/transfer_lane.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/transitions/mutants.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using ipc::Deadline;
using ipc::ErrorCode;
using ipc::MoverJobDone;
using ipc::Status;
using ipc::Transition;

constexpr std::chrono::milliseconds kGreetWithin{500};

}  // namespace

TransferLane::TransferLane(ipc::Device& device,
                           Options options,
                           Done done,
                           std::function<void(const ipc::Error&)> device_failed)
    : options_(std::move(options)),
      done_(std::move(done)),
      device_failed_(std::move(device_failed)),
      staging_(options_.staging),
      held_(staging_, [this](MoverJobDone result) { finish(std::move(result)); }),
      budget_(options_.bytes_per_second) {
  auto stream = device.make_stream(ipc::StreamPriority::kNormal);
  if (!stream) throw ipc::Exception(std::move(stream).error());
  stream_ = std::move(stream).value();
  constexpr std::uint64_t kWordsBytes = 64;
  auto words = device.make_pinned_buffer(kWordsBytes);
  if (!words) throw ipc::Exception(std::move(words).error());
  words_ = std::move(words).value();
  const ipc::StreamWord ended(reinterpret_cast<std::uint32_t*>(words_->data()));
  pipeline_.emplace(CopyPipeline::Context{options_.direction,
                                          options_.lane,
                                          *stream_,
                                          ended,
                                          copied_,
                                          stopped_,
                                          wanted_,
                                          staging_,
                                          options_.transitions,
                                          // Not at a job's end: that may be long after.
                                          [this] { release_held(); },
                                          options_.device_hang,
                                          {budget_.is_limited(), options_.urgent_loads}});
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
  expect(job);
  {
    const std::lock_guard lock(mutex_);
    const auto place = std::find_if(queue_.begin(), queue_.end(), [&job](const LaneJob& queued) {
      return job.job.urgency.goes_before(queued.job.urgency);
    });
    queue_.insert(place, std::move(job));
  }
  changed_.notify_all();
  wanted_.signal();
}

// What comes after a restart is all over the pool, nothing of which is registered: while others are
// copied before it.
void TransferLane::expect(const LaneJob& job) {
  std::vector<std::uint64_t> offsets;
  offsets.reserve(2 * job.job.items.size());
  for (const ipc::MoverItem& item : job.job.items) {
    offsets.push_back(item.shard_offset);
    if (item.with_replicated) offsets.push_back(item.replicated_offset);
  }
  job.pool->expect(offsets);
}

void TransferLane::cancel(ipc::JobId job) {
  std::optional<LaneJob> cancelled;
  {
    const std::lock_guard lock(mutex_);
    if (const auto running = running_.find(job); running != running_.end()) {
      running->second.add(ErrorCode::kCancelled);
      stopped_.signal();  // it may wait for the worker
      return;
    }
    const auto found = std::find_if(queue_.begin(), queue_.end(),
                                    [job](const LaneJob& queued) { return queued.job.job == job; });
    if (found == queue_.end()) return;
    cancelled = std::move(*found);
    queue_.erase(found);
  }
  refuse(cancelled->job, KVFERRY_ERROR(kCancelled, "cancelled before it started"));
}

void TransferLane::revoke(ErrorCode code) {
  std::deque<LaneJob> revoked;
  {
    const std::lock_guard lock(mutex_);
    revoked.swap(queue_);
    for (auto& [job, reason] : running_) reason.add(code);
  }
  stopped_.signal();
  for (const LaneJob& job : revoked) {
    ipc::Error error = KVFERRY_ERROR(kRevoked, "{} before it started", ipc::to_string(code));
    error.code = code;
    refuse(job.job, error);
  }
  changed_.notify_all();
}

void TransferLane::greet() {
  {
    const std::lock_guard lock(mutex_);
    greets_ = true;
  }
  changed_.notify_all();
  wanted_.signal();
}

void TransferLane::greet_if_idle() {
  {
    const std::lock_guard lock(mutex_);
    if (!greets_ || !running_.empty() || !queue_.empty()) return;
    greets_ = false;
  }
  // New jobs and stops come first; whether there is an agent shows when something is handed over.
  const ipc::Status greeted =
      staging_.ensure_connected(ipc::Deadline::after(kGreetWithin), wanted_.fd());
  if (greeted) return;
  ipc::log_debug("the worker was not greeted: {}", greeted.error().to_string());
  if (greeted.error().code != ErrorCode::kCancelled) return;
  const std::lock_guard lock(mutex_);
  greets_ = true;  // after what came
}

void TransferLane::take_pool_back() {
  {
    const std::lock_guard lock(mutex_);
    takes_back_ = true;
  }
  changed_.notify_all();
  wanted_.signal();
}

bool TransferLane::is_to_take_back() {
  const std::lock_guard lock(mutex_);
  return std::exchange(takes_back_, false);
}

Status TransferLane::wait_idle(Deadline deadline) {
  std::unique_lock lock(mutex_);
  // wait: running jobs of the lane, whose hand-overs are abandoned; deadline, of the drain; the
  // failure of the device
  const bool idle = changed_.wait_until(lock, deadline.when(), [this] {
    return stream_failure_ || (running_.empty() && queue_.empty());
  });
  if (stream_failure_) return *stream_failure_;
  if (idle) return ipc::ok();
  return KVFERRY_ERROR(kTimeout, "copies in flight did not end in time");
}

bool TransferLane::idle() {
  const std::lock_guard lock(mutex_);
  return running_.empty() && queue_.empty() && !holding_ && !stream_failure_;
}

void TransferLane::run() {
  for (;;) {
    // Before what they tell of is looked at.
    wanted_.drain();
    stopped_.drain();
    if (!wait_for_work()) return;
    const bool takes_back = is_to_take_back();  // before the stops that it came after
    apply_stops();
    greet_if_idle();
    if (takes_back) {
      if (const Status given = staging_.lend(nullptr); !given) {
        ipc::log_warn("the worker keeps a pool for as long as it is connected: {}",
                      given.error().to_string());
      }
    }
    start_chunks();
    answer_ended();
    if (pipeline_->empty()) {
      if (!held_.empty()) {
        held_.pursue(wanted_.fd());
        release_held();
      }
      continue;
    }
    if (const Status waited = pipeline_->await_progress(paced_); !waited) {
      fail_stream(waited.error());
      return;
    }
    answer_ended();
  }
}

bool TransferLane::wait_for_work() {
  std::unique_lock lock(mutex_);
  if (!running_.empty()) return true;
  // wait-idle: jobs; submit() or the end of the lane; thread kvf-store, kvf-load
  if (!holding_) {
    changed_.wait(lock, [this] { return stopping_ || takes_back_ || greets_ || !queue_.empty(); });
  }
  return !stopping_;
}

void TransferLane::apply_stops() {
  std::vector<std::pair<ipc::JobId, ErrorCode>> stops;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [job, reason] : running_) {
      if (const auto code = reason.get()) stops.emplace_back(job, *code);
    }
  }
  for (const auto& [job, code] : stops) pipeline_->stop(job, code);
}

std::optional<ipc::TimePoint> TransferLane::paced_until(const RunningJob& job) {
  if (!budget_.is_limited() || job.urgency().priority > ipc::Urgency::kAhead ||
      budget_.allows(ipc::MonotonicClock::now())) {
    return std::nullopt;
  }
  return budget_.next();
}

void TransferLane::start_chunks() {
  paced_.reset();
  while (pipeline_->has_room()) {
    // A stream of better jobs must not hold one back for ever. Nor does one that cannot be started
    // hold them up: its turn stays.
    const bool is_oldests_turn = started_ + 1 >= kFairShare;
    if (is_oldests_turn && start_chunk(true)) {
      started_ = 0;
    } else if (start_chunk(false)) {
      ++started_;
    } else {
      return;
    }
    pipeline_->look();
    answer_ended();  // one whose connection failed: the next may wait for the same greeting
  }
}

bool TransferLane::start_chunk(bool fair) {
  RunningJob* const next = choose(fair);
  if (next == nullptr) return false;
  const auto paced = paced_until(*next);
  if (paced) {
    if (!fair) paced_ = paced;
    return false;
  }
  const bool is_urgent = next->urgency().priority > ipc::Urgency::kAhead;
  const std::uint64_t before = pipeline_->started_bytes();
  if (!pipeline_->start_chunk(*next, fair && !is_urgent && is_waited_for())) return false;
  const std::uint64_t started = pipeline_->started_bytes() - before;
  if (is_urgent) {
    budget_.spend_unasked(started, ipc::MonotonicClock::now());
  } else {
    budget_.spend(started, ipc::MonotonicClock::now());
  }
  return true;
}

bool TransferLane::is_waited_for() {
  const auto is_urgent = [](const ipc::Urgency& urgency) {
    return urgency.priority > ipc::Urgency::kAhead;
  };
  if (const RunningJob* best = pipeline_->best(); best != nullptr && is_urgent(best->urgency())) {
    return true;
  }
  const std::lock_guard lock(mutex_);
  return !queue_.empty() && is_urgent(queue_.front().job.urgency);
}

RunningJob* TransferLane::choose(bool fair) {
  for (;;) {
    RunningJob* running = fair ? pipeline_->oldest() : pipeline_->best();
    std::optional<LaneJob> queued;
    bool twice = false;
    {
      const std::lock_guard lock(mutex_);
      const auto found = better_queued(running, fair);
      if (found == queue_.end()) return running;
      queued = std::move(*found);
      queue_.erase(found);
      if (!running_.try_emplace(queued->job.job).second) twice = true;
    }
    if (twice) {
      refuse(queued->job,
             KVFERRY_ERROR(kInvalidArgument, "job {} runs already", queued->job.job.value));
      continue;
    }
    RunningJob& begun = pipeline_->begin(std::move(*queued));
    if (pipeline_->may_start(begun)) return &begun;
    answer_ended();  // there may be nothing to copy
  }
}

std::deque<LaneJob>::iterator TransferLane::better_queued(const RunningJob* running, bool fair) {
  auto found = queue_.begin();
  if (fair) {
    found = std::min_element(queue_.begin(), queue_.end(), [](const LaneJob& a, const LaneJob& b) {
      return a.submitted < b.submitted;
    });
  }
  if (found == queue_.end() || running == nullptr) return found;
  const bool better = fair ? found->submitted < running->job().submitted
                           : found->job.urgency.goes_before(running->urgency());
  return better ? found : queue_.end();
}

void TransferLane::answer_ended() {
  while (auto job = pipeline_->take_over()) answer(std::move(job));
}

void TransferLane::answer(std::unique_ptr<RunningJob> job) {
  const ipc::JobId id = job->id();
  MoverJobDone result = job->take_result();
  const bool proven = job->proven() || ipc::is_mutant("answers_what_it_abandoned");
  // The arena goes before the lane calls itself idle: a detach may unmap right then. The pool goes
  // after: the last user of a lost manager's pool unpins it, and a detach must not wait for that.
  const std::shared_ptr<ipc::PoolMapping> pool = job->job().pool;
  job.reset();
  if (proven) {
    finish(std::move(result));
  } else {
    held_.add(std::move(result));
  }
  {
    const std::lock_guard lock(mutex_);
    running_.erase(id);
    holding_ = !held_.empty();
  }
  changed_.notify_all();
  release_held();
}

// A greeting may have brought the proof for answers that are held.
void TransferLane::release_held() {
  held_.release_if_proven();
  const std::lock_guard lock(mutex_);
  holding_ = !held_.empty();
}

// An answer would give on blocks that a copy may still write: our death gives it.
void TransferLane::fail_stream(const ipc::Error& error) {
  for (const ipc::JobId job : pipeline_->jobs()) {
    ipc::log_error("job {} stays unanswered, its copies cannot be shown to have ended: {}",
                   job.value, error.to_string());
  }
  {
    const std::lock_guard lock(mutex_);
    stream_failure_ = error;
  }
  changed_.notify_all();
  device_failed_(error);
}

void TransferLane::refuse(const ipc::MoverJob& job, const ipc::Error& error) {
  MoverJobDone result;
  result.job = job.job;
  result.results.assign(job.items.size(), static_cast<std::uint8_t>(error.code));
  result.message = error.message;
  finish(std::move(result));
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
