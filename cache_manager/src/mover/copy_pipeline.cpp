// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/copy_pipeline.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/look.hpp"
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
constexpr std::size_t kMostCopies = 16;
/// Of the worker's agent, in jobs that it copies itself.
constexpr std::size_t kMostAsked = 4;
/// Copies that are enqueued one by one: a full queue of the driver would hold the lane up.
constexpr std::size_t kMostCalls = 512;
constexpr std::uint32_t kLanes = 2;
/// Of jobs that have ended; more are seldom under way at once.
constexpr std::size_t kSparePlans = 8;
/// Chunks by layers that wait: of stores for the worker's compute, of loads for their check.
constexpr std::ptrdiff_t kMostWaiting = 4;
/// A copy or hand-over of so many bytes, alone under way, is looked at for so long before it is
/// slept on: a notice costs 35 us of time and 43 of a processor (H100, CUDA 13.0), a copy of a 2
/// MiB block takes 45.
constexpr std::uint64_t kWatchedBytes = std::uint64_t{4} << 20;
constexpr std::chrono::microseconds kWatch{150};
/// Of a load that is alone: for so many chunks their ends are looked at, one by one. Those of a
/// long one would take a processor all the time for what notices tell soon enough.
constexpr std::uint64_t kMarkedChunks = 8;

// An eventfd's count since the last read; 0 when it was not signalled.
std::uint64_t take_count(int event_fd) noexcept {
  std::uint64_t count = 0;
  // wait-none: an eventfd of ours, O_NONBLOCK
  return ::read(event_fd, &count, sizeof(count)) == sizeof(count) ? count : 0;
}

}  // namespace

bool CopyPipeline::has_room() const noexcept {
  if (jobs_.empty()) return true;
  if (arena_ != nullptr && arena_->chooser != nullptr) {
    return has_room_for({CopyStrategy::kStaged}) || has_room_for({CopyStrategy::kBatch});
  }
  return has_room_for({arena_ != nullptr ? arena_->strategy : CopyStrategy::kBatch});
}

CopyDepth::Kind CopyPipeline::kind_of(const RunningJob& job) noexcept {
  return {job.strategy(), job.urgency().priority <= ipc::Urgency::kAhead};
}

bool CopyPipeline::has_room_for(CopyDepth::Kind kind) const noexcept {
  const bool staged = kind.strategy == CopyStrategy::kStaged;
  if (kind.strategy == CopyStrategy::kAgent) return asked_.size() < kMostAsked;
  if (staged && (stores() || free_slots_.empty())) return !free_slots_.empty();
  return copying_bytes_ < depth_.most_bytes(kind, ipc::MonotonicClock::now()) &&
         copying_.size() < kMostCopies && copying_calls_ < kMostCalls;
}

RunningJob& CopyPipeline::begin(LaneJob job) {
  if (const RunningJob* worse = best(); worse != nullptr &&
                                        worse->urgency().priority > ipc::Urgency::kAhead &&
                                        job.job.urgency.goes_before(worse->urgency())) {
    depth_.note_better(ipc::MonotonicClock::now());
  }
  job.strategy = choose(job, jobs_.empty(), !context_.staging.refuses_pools());
  const bool in_parts =
      job.strategy == CopyStrategy::kKernel || job.strategy == CopyStrategy::kAgent;
  if (job.job.layers && in_parts) job.strategy = CopyStrategy::kBatch;
  context_.transitions.record(Transition::kMoverStart, {.job = job.job.job});
  PlanMemory memory;
  if (!spare_.empty()) {
    memory = std::move(spare_.back());
    spare_.pop_back();
  }
  RunningJob& begun =
      *jobs_.emplace_back(std::make_unique<RunningJob>(std::move(job), std::move(memory)));
  note_loads();
  return begun;
}

void CopyPipeline::note_loads() {
  if (stores()) return;
  const bool loading = std::any_of(jobs_.begin(), jobs_.end(), [](const auto& job) {
    return job->urgency().priority > ipc::Urgency::kAhead;
  });
  load_waits_.note(ipc::MonotonicClock::now(), loading, context_.staging.is_mostly_computing());
}

CopyStrategy CopyPipeline::choose(const LaneJob& job, bool alone, bool agent) {
  const MappedArena& arena = *job.arena;
  // A job that goes layer by layer is no case that was measured.
  if (arena.chooser == nullptr || job.job.layers) return arena.strategy;
  const StrategyChooser::Compute compute{context_.staging.is_mostly_computing(),
                                         load_waits_.are_waited_for()};
  const HandOverCost hand_over = hand_overs_.cost(ipc::MonotonicClock::now());
  const CopyStrategy chosen = arena.chooser->choose(job.job, alone, hand_over, compute, agent);
  ipc::log_debug("job {}: {} blocks {}, {}; hand-overs take {:.0f} us and {:.1f} a MiB",
                 job.job.job.value, job.job.items.size(), stores() ? "to host" : "to device",
                 to_string(chosen), hand_over.base_us, hand_over.us_per_mib);
  return chosen;
}

RunningJob* CopyPipeline::best() noexcept {
  RunningJob* best = nullptr;
  for (const auto& job : jobs_) {
    if (may_start(*job) && (best == nullptr || job->urgency().goes_before(best->urgency()))) {
      best = job.get();
    }
  }
  return best;
}

// Chunks by layers wait, each in a slot of the ring: others need some, too.
bool CopyPipeline::may_start(const RunningJob& job) const noexcept {
  if (!job.has_next()) return false;
  if (!job.is_layered() || !(stores() || (job.is_staged() && is_pending(job)))) return true;
  const auto waits = [](const Chunk* chunk) { return is_pending(*chunk->job); };
  const auto waiting =
      stores() ? std::count_if(asked_.begin(), asked_.end(),
                               [](const auto& entry) { return entry.second->job->is_layered(); })
               : std::count_if(copying_.begin(), copying_.end(), waits) +
                     std::count_if(unchecked_.begin(), unchecked_.end(), waits);
  const std::uint32_t slots = job.job().arena->arena->layout().staging.slots / kLanes;
  return waiting < std::clamp<std::ptrdiff_t>(slots / 2, 1, kMostWaiting);
}

RunningJob* CopyPipeline::oldest() noexcept {
  RunningJob* oldest = nullptr;
  for (const auto& job : jobs_) {
    if (may_start(*job) && (oldest == nullptr || job->job().submitted < oldest->job().submitted)) {
      oldest = job.get();
    }
  }
  return oldest;
}

// Each lane has its half of the ring, so that loads and stores never wait for each other's slots.
bool CopyPipeline::adopt_ring(const LaneJob& job) {
  if (arena_ == job.arena) return true;
  if (!asked_.empty() || !copying_.empty() || !unchecked_.empty()) return false;
  arena_ = job.arena;
  free_slots_.clear();
  for (std::uint32_t slot = context_.lane; slot < arena_->arena->layout().staging.slots;
       slot += kLanes) {
    free_slots_.push_back(slot);
  }
  return true;
}

bool CopyPipeline::start_chunk(RunningJob& job, bool before_better) {
  const CopyDepth::Kind kind = kind_of(job);
  CopyDepth::Kind room = kind;
  if (before_better) room.ahead = false;
  if (!adopt_ring(job.job()) || !has_room_for(room)) return false;
  if (!job.hands_over()) {
    copy(start_next(job, kind));
    return true;
  }
  if (!connect(job)) return false;
  if (!job.has_next()) return true;  // its connection failed, and with it the job
  if (!job.hands_over()) {
    copy(start_next(job, kind));
    return true;
  }
  Chunk& chunk = start_next(job, kind);
  if (job.is_staged()) {
    chunk.slot = free_slots_.back();
    free_slots_.pop_back();
  }
  if (stores() || job.is_agents()) {
    ask_worker(chunk);
  } else {
    copy(chunk);
  }
  return true;
}

Chunk& CopyPipeline::start_next(RunningJob& job, CopyDepth::Kind kind) {
  std::uint64_t bytes = depth_.call_bytes(kind, ipc::MonotonicClock::now());
  if (job.is_layered()) bytes = std::min(bytes, CopyDepth::kSlotBytes);
  Chunk& chunk = job.start_next(bytes);
  started_bytes_ += chunk.plan.size_bytes;
  return chunk;
}

bool CopyPipeline::connect(RunningJob& job) {
  if (!asked_.empty()) return true;
  // A greeting is waited for here, so first comes what is on its way.
  if (!context_.staging.is_connected() && !(copying_.empty() && unchecked_.empty())) return false;
  const Status connected = context_.staging.ensure_connected(ipc::Deadline::after(kConnectDeadline),
                                                             context_.stopped.fd());
  if (connected) {
    context_.on_greeted();
    return true;
  }
  // A greeting that was asked for stays asked for: nothing is handed over before it.
  if (connected.error().code == ErrorCode::kCancelled) return false;
  if (!job.has_started() && goes_otherwise(job, connected.error().code)) {
    begin_otherwise(job, connected.error());
    if (!job.hands_over()) return true;  // or else it would wait for the same
  }
  job.fail_rest(connected.error().code, connected.error().message);
  return true;
}

Status CopyPipeline::enqueue(const Chunk& chunk) {
  const LaneJob& job = chunk.job->job();
  const bool staged = chunk.job->is_staged();
  const ipc::DevicePtr slot =
      staged ? job.arena->arena->staging_slot(chunk.slot) : ipc::DevicePtr{};
  ops_.clear();
  for (const CopyRun& run : chunk.plan.runs) {
    KVFERRY_ASSIGN(void* host, job.pool->pinned(run.pool_offset, run.size_bytes));
    const ipc::DevicePtr base = staged ? slot : job.arena->arena->segment(run.segment);
    ops_.push_back({host, base + run.device_offset, run.size_bytes});
  }
  row_ops_.clear();
  for (const CopyRows& rows : chunk.plan.rows) {
    KVFERRY_ASSIGN(void* host, job.pool->pinned(rows.pool_offset, rows.pool_bytes()));
    const ipc::DevicePtr base = staged ? slot : job.arena->arena->segment(rows.segment);
    row_ops_.push_back({host, rows.pool_pitch, base + rows.device_offset, rows.device_pitch,
                        rows.row_bytes, rows.rows});
  }
  for (const PackedRun& run : chunk.plan.packed) KVFERRY_TRY(launch(chunk, run));
  if (!row_ops_.empty()) KVFERRY_TRY(context_.stream.copy_rows(context_.direction, row_ops_));
  if (ops_.empty()) return ipc::ok();
  const bool each = chunk.job->strategy() == CopyStrategy::kMemcpy;
  return context_.stream.copy(context_.direction, ops_,
                              each ? ipc::CopyMode::kEach : ipc::CopyMode::kBatch);
}

// Pinned memory has the same address on the device.
Status CopyPipeline::launch(const Chunk& chunk, const PackedRun& run) {
  const LaneJob& job = chunk.job->job();
  KVFERRY_ASSIGN(void* host, job.pool->pinned_across(run.pool_offset, run.count * run.part_bytes));
  const ipc::RegionTable& table = job.arena->table(chunk.plan.group, run.set);
  const auto blocks = std::span(chunk.plan.blocks).subspan(run.first, run.count);
  const ipc::DevicePtr parts{reinterpret_cast<std::uintptr_t>(host)};
  return stores() ? context_.stream.gather(table, blocks, parts, run.part_bytes)
                  : context_.stream.scatter(table, blocks, parts, run.part_bytes);
}

std::size_t CopyPipeline::calls_of(const Chunk& chunk) noexcept {
  if (!chunk.plan.packed.empty()) return chunk.plan.packed.size();
  if (chunk.job->strategy() == CopyStrategy::kMemcpy) return chunk.plan.runs.size();
  return chunk.plan.rows.size() + (chunk.plan.runs.empty() ? 0 : 1);
}

void CopyPipeline::copy(Chunk& chunk) {
  // One that is watched, or the last of its job, does not wait for those after it.
  if (unnoticed_ > 0 && !copying_.back()->job->has_next()) ask_for_notice();
  const ipc::TransitionFields about = step(chunk, chunk.number);
  Status moved = context_.transitions.attempt(Transition::kMoverCopy, about);
  if (moved) moved = enqueue(chunk);
  if (moved) context_.transitions.record(Transition::kMoverCopying, about);
  if (!moved) {
    chunk.job->fail(chunk, moved.error().code, moved.error().message);
    ipc::log_warn("job {}: copy failed: {}", chunk.job->id().value, moved.error().to_string());
  }
  if (copying_.empty()) looked_at_ = ipc::MonotonicClock::now();
  copying_.push_back(&chunk);
  copying_calls_ += calls_of(chunk);
  copying_bytes_ += chunk.plan.size_bytes;
  ++enqueued_;
  // Also when the copy was not whole, or is not marked: what went out of it must be awaited.
  ++unnoticed_;
  unnoticed_bytes_ += chunk.plan.size_bytes;
  chunk.is_marked = is_to_be_marked(chunk);
  if (chunk.is_marked) {
    const Status marked = context_.stream.write_word(context_.ended, enqueued_);
    if (!marked) return lose_track(marked.error());
  }
  const bool last = !chunk.job->has_next() && !is_watched();
  if (last || unnoticed_bytes_ >= bytes_of_a_notice(chunk) || unnoticed_ >= kMostCopies / 2) {
    ask_for_notice();
  }
}

bool CopyPipeline::is_watched() const noexcept {
  if (copying_.empty()) return false;
  if (copying_.front()->is_marked) return true;
  return copying_.size() == 1 && unnoticed_ == 1 &&
         copying_.front()->plan.size_bytes <= kWatchedBytes;
}

// Half of what may be under way: the link has the other half when the notice comes.
std::uint64_t CopyPipeline::bytes_of_a_notice(const Chunk& chunk) const noexcept {
  if (chunk.job->is_layered()) return 0;  // what it brings is waited for
  if (!stores() || !chunk.job->is_staged()) {
    return depth_.most_bytes(kind_of(*chunk.job), ipc::MonotonicClock::now()) / 2;
  }
  const ipc::StagingRing& staging = arena_->arena->layout().staging;
  return staging.slot_bytes * (staging.slots / kLanes) / 2;
}

void CopyPipeline::ask_for_notice() {
  const Status notified = context_.stream.notify(context_.copied.fd());
  if (!notified) return lose_track(notified.error());
  notices_.push_back(enqueued_);
  unnoticed_ = 0;
  unnoticed_bytes_ = 0;
}

// The stream will not tell when the last copy has ended.
void CopyPipeline::lose_track(const ipc::Error& error) {
  unnotified_ = true;
  Chunk& chunk = *copying_.back();
  chunk.job->fail(chunk, error.code, error.message);
  abandon(error.code, error.message);
}

Status CopyPipeline::await_progress(std::optional<ipc::TimePoint> until) {
  if (ipc::is_mutant("answers_before_its_copies")) {
    copying_calls_ = 0;
    copying_bytes_ = 0;
    unnoticed_ = 0;
    unnoticed_bytes_ = 0;
    ended_ = enqueued_;
    taken_ = enqueued_;
    for (Chunk* chunk : std::exchange(copying_, {})) end(*chunk);
  }
  if (take_checked() || watch_checks()) return ipc::ok();
  if (is_watched() ? watch_copies() : watch_hand_over()) return ipc::ok();
  if (unnoticed_ > 0 && notices_.empty() && !unnotified_) ask_for_notice();
  if (unnotified_) return end_unnotified();
  const ipc::ProcessRef& agent = context_.staging.agent();
  std::array<pollfd, 5> waited{{{context_.copied.fd(), POLLIN, 0},
                                {context_.stopped.fd(), POLLIN, 0},
                                {context_.wanted.fd(), POLLIN, 0},
                                {asked_.empty() ? -1 : context_.staging.fd(), POLLIN, 0},
                                {asked_.empty() ? -1 : agent.pidfd(), POLLIN, 0}}};
  ipc::Deadline next_look = ipc::Deadline::after(kDeviceCheck);
  if (until) next_look = next_look.earlier(ipc::Deadline::at(*until));
  // wait: own copies (together at most kDeviceHang without progress) and the worker's hand-overs
  // (until the manager's job deadline kills this mover), checks of loads, and time for more of
  // them; next_look, at most kDeviceCheck; the worker's pidfd, cancel and revoke, and new jobs
  const int ready = ::poll(waited.data(), waited.size(), next_look.poll_timeout_ms());
  const std::uint64_t copied = ready > 0 ? take_count(context_.copied.fd()) : 0;
  for (std::uint64_t i = 0; i < copied && !notices_.empty(); ++i) {
    ended_ = notices_.front();
    notices_.pop_front();
  }
  // Looked at after every wait: a failed device wakes nobody.
  if (const auto state = context_.stream.query(); !state) return state.error();
  if (!take_ended() && looks_hung()) return device_hangs(looked_);
  if (ready <= 0) return ipc::ok();
  if (waited[3].revents != 0) take_replies();
  if (waited[4].revents != 0 && !asked_.empty()) {
    // A child that it had forked may keep the connection open.
    abandon(ErrorCode::kPeerDied, fmt::format("worker (pid {}) died", agent.pid()));
  }
  return ipc::ok();
}

// New jobs, or stops: what is under way is not all that there is to do.
bool CopyPipeline::has_news() const noexcept {
  std::array<pollfd, 2> news{
      {{context_.wanted.fd(), POLLIN, 0}, {context_.stopped.fd(), POLLIN, 0}}};
  // wait-none: looks only
  return ::poll(news.data(), news.size(), 0) > 0;
}

std::uint32_t CopyPipeline::count_ended() const noexcept {
  const auto beyond = [this](std::uint32_t ended) {
    return std::max(static_cast<std::int32_t>(ended - taken_), 0);
  };
  return static_cast<std::uint32_t>(std::max(beyond(context_.ended.load()), beyond(ended_)));
}

bool CopyPipeline::take_ended() {
  const std::uint32_t ended = count_ended();
  if (ended == 0) return false;
  take_copies(ended);
  return true;
}

// A mark comes between two copies, which costs some 30 us. So only where each chunk is waited for:
// by compute, or by the worker, which scatters one while the next one is copied.
bool CopyPipeline::is_to_be_marked(const Chunk& chunk) const noexcept {
  if (chunk.job->is_layered()) return true;
  return !stores() && chunk.job->is_staged() && jobs_.size() == 1 && chunk.job->has_next() &&
         chunk.number <= kMarkedChunks;
}

bool CopyPipeline::watch_copies() {
  const bool is_marked = copying_.front()->is_marked;
  (void)ipc::look_for(kWatch, [&] {
    if (!is_marked) {
      const auto idle = context_.stream.query();  // a failure is seen by whoever waits
      if (idle && *idle) ended_ = enqueued_;
    }
    return count_ended() > 0 || has_news();
  });
  const bool some = take_ended();
  if (some && !asked_.empty()) take_replies();
  return some;
}

bool CopyPipeline::watch_checks() {
  if (unchecked_.empty() || !copying_.empty() || !asked_.empty()) return false;
  (void)ipc::look_for(kWatch, [this] { return has_news(); });
  return take_checked();
}

void CopyPipeline::look() {
  (void)take_checked();
  if (copying_.empty() || !copying_.front()->is_marked || !take_ended()) return;
  if (!asked_.empty()) take_replies();
}

bool CopyPipeline::watch_hand_over() {
  if (asked_.size() != 1 || !copying_.empty()) return false;
  if (asked_.begin()->second->plan.size_bytes > kWatchedBytes) return false;
  (void)ipc::look_for(kWatch, [this] {
    take_replies();
    return asked_.empty() || has_news();
  });
  return asked_.empty();
}

// Looks are counted, not time: after a stop of this process the device gets all of it again. And
// not waits that nothing ended: new jobs may come all the time.
bool CopyPipeline::looks_hung() noexcept {
  const ipc::TimePoint now = ipc::MonotonicClock::now();
  if (copying_.empty()) looked_at_ = now;
  if (now - looked_at_ < kDeviceCheck) return false;
  looked_at_ = now;
  looked_ += kDeviceCheck;
  return looked_ >= context_.device_hang;
}

Status CopyPipeline::end_unnotified() {
  KVFERRY_TRY(wait_stream_idle(context_.stream, context_.device_hang));
  unnotified_ = false;
  notices_.clear();
  take_count(context_.copied.fd());
  ended_ = enqueued_;
  take_copies(copying_.size());
  return ipc::ok();
}

void CopyPipeline::take_copies(std::size_t count) {
  looked_ = std::chrono::milliseconds::zero();
  looked_at_ = ipc::MonotonicClock::now();
  for (; count > 0 && !copying_.empty(); --count) {
    Chunk& chunk = *copying_.front();
    if (unnoticed_ == copying_.size()) {
      --unnoticed_;
      unnoticed_bytes_ -= chunk.plan.size_bytes;
    }
    copying_.pop_front();
    ++taken_;
    copying_calls_ -= calls_of(chunk);
    copying_bytes_ -= chunk.plan.size_bytes;
    context_.transitions.record(Transition::kMoverCopied, step(chunk, chunk.number));
    go_on(chunk);
  }
}

void CopyPipeline::go_on(Chunk& chunk) {
  RunningJob& job = *chunk.job;
  if (chunk.failed || stores() || !job.hands_over()) return end(chunk);
  if (const auto abandoned = job.abandoned()) {
    job.fail(chunk, *abandoned, "staging was abandoned");
    return end(chunk);
  }
  if (job.is_layered() && job.has_failed()) {
    // A layer before this one is not there: it may not be said that this one is.
    job.fail(chunk, ErrorCode::kCancelled, "another part of the job failed");
    return end(chunk);
  }
  if (const auto& check = job.job().check; check != nullptr) {
    const LoadCheck::State state = check->state();
    // It may have been decided since the one before this was held: they go in order.
    const bool is_next = std::none_of(unchecked_.begin(), unchecked_.end(),
                                      [&job](const Chunk* held) { return held->job == &job; });
    if (state == LoadCheck::State::kPending || !is_next) return unchecked_.push_back(&chunk);
    if (state == LoadCheck::State::kDamaged) {
      job.fail(chunk, ErrorCode::kCancelled,
               "a block of a load by layers is damaged in host memory");
      return end(chunk);
    }
  }
  ask_worker(chunk);
}

bool CopyPipeline::take_checked() {
  if (unchecked_.empty()) return false;
  const std::deque<Chunk*> waiting = std::exchange(unchecked_, {});
  for (Chunk* chunk : waiting) go_on(*chunk);
  return unchecked_.size() < waiting.size();
}

void CopyPipeline::end(Chunk& chunk) {
  if (chunk.job->is_staged()) free_slots_.push_back(chunk.slot);
  chunk.job->end(chunk);
}

void CopyPipeline::stop(ipc::JobId stopped, ErrorCode code) {
  if (code == ErrorCode::kRevoked) {
    // The end of the epoch: of all.
    abandon(code, "the epoch ends");
    for (const auto& job : jobs_) job->fail_rest(code, "the epoch ends");
    return;
  }
  // Only what has not started: the epoch goes on, so hand-overs are worth waiting for.
  const std::string why = fmt::format("{} while it ran", to_string(code));
  for (const auto& job : jobs_) {
    if (job->id() == stopped) job->fail_rest(code, why);
  }
  // Nor what the worker knows nothing of yet.
  const auto held =
      std::stable_partition(unchecked_.begin(), unchecked_.end(),
                            [stopped](const Chunk* chunk) { return chunk->job->id() != stopped; });
  const std::vector<Chunk*> ended(held, unchecked_.end());
  unchecked_.erase(held, unchecked_.end());
  for (Chunk* chunk : ended) {
    chunk->job->fail(*chunk, code, why);
    end(*chunk);
  }
}

std::unique_ptr<RunningJob> CopyPipeline::take_over() {
  const auto over =
      std::find_if(jobs_.begin(), jobs_.end(), [](const auto& job) { return job->is_over(); });
  if (over == jobs_.end()) return nullptr;
  std::unique_ptr<RunningJob> job = std::move(*over);
  jobs_.erase(over);
  note_loads();
  if (spare_.size() < kSparePlans) spare_.push_back(job->take_memory());
  if (jobs_.empty()) arena_.reset();  // a detach may unmap it as soon as the lane is idle
  return job;
}

std::vector<ipc::JobId> CopyPipeline::jobs() const {
  std::vector<ipc::JobId> ids;
  for (const auto& job : jobs_) ids.push_back(job->id());
  return ids;
}

}  // namespace kvferry::cache_manager
