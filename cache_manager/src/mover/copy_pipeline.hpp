// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "mover/copy_depth.hpp"
#include "mover/hand_over_meter.hpp"
#include "mover/load_waits.hpp"
#include "mover/running_job.hpp"
#include "mover/staging_client.hpp"
#include "mover/stream_wait.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

namespace kvferry::cache_manager {

/// The chunks of a lane that are under way, of any number of jobs: the next job's begin before the
/// last one's have ended, so that the link never waits.
///
/// Straight: copy, done; or the worker's agent does that, with kernels. By cooperative staging,
/// where the worker's agent gathers (scatters) blocks into (out of) ring slots in its own process
/// and this side moves the slots by copy engine: a store is gather, copy, done; a load copy,
/// scatter, done.
///
/// A hand-over that is abandoned (end of the epoch, lost connection, dead worker) fails its blocks
/// and is not waited for here: the staging client is in debt for it then, and no slot is used again
/// before that is paid. A copy of ours is always waited for.
/// @threading the lane's thread.
class CopyPipeline {
 public:
  struct Context {
    ipc::CopyDirection direction;
    std::uint32_t lane;
    ipc::Stream& stream;
    ipc::StreamWord ended;        ///< Counts copies that have ended, as far as they are marked.
    const ipc::EventFd& copied;   ///< Counts notify()s of the stream.
    const ipc::EventFd& stopped;  ///< Wakes await_progress(), and a wait for the worker's greeting.
    const ipc::EventFd& wanted;   ///< Wakes await_progress().
    StagingClient& staging;
    const ipc::TransitionLog& transitions;
    std::function<void()> on_greeted;  ///< The agent serves: what was asked of it before has ended.
    std::chrono::milliseconds device_hang = kDeviceHang;
    CopyDepth::Options depth = {};
  };

  explicit CopyPipeline(Context context)
      : context_(std::move(context)), depth_(context_.direction, context_.depth) {}

  [[nodiscard]] bool empty() const noexcept { return jobs_.empty(); }
  /// Another chunk may be started now: copies under way and slots are bounded, so that a better job
  /// never waits for more than those.
  [[nodiscard]] bool has_room() const noexcept;
  RunningJob& begin(LaneJob job);
  /// Of the jobs that have begun and have more to start: the best, or the first one.
  [[nodiscard]] RunningJob* best() noexcept;
  [[nodiscard]] RunningJob* oldest() noexcept;
  /// Of a job that has begun: it has more to start, and need not wait with that for compute.
  [[nodiscard]] bool may_start(const RunningJob& job) const noexcept;
  /// False: not now; await_progress() first. before_better: it is its turn though others wait that
  /// are not fetched ahead, of which more may be enqueued than of such: it finds that.
  /// @pre has_room() and may_start().
  [[nodiscard]] bool start_chunk(RunningJob& job, bool before_better);

  /// With kRevoked all hand-overs are abandoned; else what has started goes on to its end, but for
  /// what waits for a check.
  void stop(ipc::JobId stopped, ipc::ErrorCode code);
  /// Until something came, or until then. kTimeout: the device hangs, and copies may still write;
  /// the device's error: the same.
  [[nodiscard]] ipc::Status await_progress(std::optional<ipc::TimePoint> until);
  /// Of all chunks ever.
  [[nodiscard]] std::uint64_t started_bytes() const noexcept { return started_bytes_; }
  /// Goes on with what has ended, without waiting, where something waits for each chunk.
  void look();
  /// A job that is over, or null.
  [[nodiscard]] std::unique_ptr<RunningJob> take_over();
  /// Of the jobs that have begun.
  [[nodiscard]] std::vector<ipc::JobId> jobs() const;

 private:
  [[nodiscard]] bool stores() const noexcept {
    return context_.direction == ipc::CopyDirection::kDeviceToHost;
  }
  [[nodiscard]] static CopyDepth::Kind kind_of(const RunningJob& job) noexcept;
  [[nodiscard]] bool has_room_for(CopyDepth::Kind kind) const noexcept;
  [[nodiscard]] bool adopt_ring(const LaneJob& job);
  Chunk& start_next(RunningJob& job, CopyDepth::Kind kind);
  /// False: not yet. True also when it failed, and with it what is left of the job.
  [[nodiscard]] bool connect(RunningJob& job);
  void ask_worker(Chunk& chunk);
  [[nodiscard]] CopyStrategy choose(const LaneJob& job, bool alone, bool agent);
  /// Of the jobs that have begun or ended by now.
  void note_loads();
  /// The agent did not copy it: whether another strategy is to, from the beginning. Not for what an
  /// agent says of the epoch, nor where the agent is all that there is.
  [[nodiscard]] static bool goes_otherwise(const RunningJob& job, ipc::ErrorCode code) noexcept;
  void begin_otherwise(RunningJob& job, const ipc::Error& error);
  [[nodiscard]] ipc::StageRequest request_of(const Chunk& chunk) const;
  void copy(Chunk& chunk);
  [[nodiscard]] bool is_watched() const noexcept;
  /// From how many on copies do not wait for more to share a notice with.
  [[nodiscard]] std::uint64_t bytes_of_a_notice(const Chunk& chunk) const noexcept;
  /// Of the end of all copies that went out.
  void ask_for_notice();
  void lose_track(const ipc::Error& error);
  [[nodiscard]] ipc::Status enqueue(const Chunk& chunk);
  [[nodiscard]] ipc::Status launch(const Chunk& chunk, const PackedRun& run);
  /// By how many calls it is enqueued.
  [[nodiscard]] static std::size_t calls_of(const Chunk& chunk) noexcept;
  [[nodiscard]] bool has_news() const noexcept;
  [[nodiscard]] std::uint32_t count_ended() const noexcept;
  /// True when some have ended, and were taken.
  bool take_ended();
  /// Whether the stream is to write the word behind it.
  [[nodiscard]] bool is_to_be_marked(const Chunk& chunk) const noexcept;
  bool watch_copies();
  /// True when something of the only hand-over under way came.
  [[nodiscard]] bool watch_hand_over();
  void take_replies();
  void take_copies(std::size_t count);
  [[nodiscard]] bool looks_hung() noexcept;
  [[nodiscard]] ipc::Status end_unnotified();
  /// What has been copied goes to the worker, or nowhere.
  void go_on(Chunk& chunk);
  /// Nothing of it may be handed over yet.
  [[nodiscard]] static bool is_pending(const RunningJob& job) noexcept {
    const auto& check = job.job().check;
    return check != nullptr && check->state() == LoadCheck::State::kPending;
  }
  /// True when something waits no longer for a check.
  bool take_checked();
  /// Likewise, after a while in which there may be nothing else to wait for.
  [[nodiscard]] bool watch_checks();
  /// The worker's answer to a hand-over is an error.
  void fail_hand_over(Chunk& chunk, const ipc::Error& error);
  void end(Chunk& chunk);
  void abandon(ipc::ErrorCode code, std::string_view message);
  /// What a step of a job is about; detail: the chunk, the hand-over or the lane.
  [[nodiscard]] static ipc::TransitionFields step(const Chunk& chunk,
                                                  std::uint64_t detail) noexcept {
    return {.job = chunk.job->id(), .detail = detail};
  }

  Context context_;
  std::list<std::unique_ptr<RunningJob>> jobs_;  ///< In the order of their beginning.
  std::vector<PlanMemory> spare_;
  /// Whose ring the slots are of; another one's jobs wait until nothing is under way.
  std::shared_ptr<const MappedArena> arena_;
  std::vector<std::uint32_t> free_slots_;
  HandOverMeter hand_overs_;
  LoadWaits load_waits_;
  std::map<std::uint64_t, Chunk*> asked_;  ///< By request id: the worker has it.
  std::deque<Chunk*> copying_;             ///< In stream order: our stream has it.
  std::deque<Chunk*> unchecked_;           ///< Copied; what the worker may be told is not known.
  std::uint64_t started_bytes_ = 0;
  std::size_t copying_calls_ = 0;
  std::uint64_t copying_bytes_ = 0;
  CopyDepth depth_;
  // Copies, counted from the lane's beginning; the numbers wrap.
  std::uint32_t enqueued_ = 0;
  std::uint32_t ended_ = 0;  ///< As notices and looks at the stream have told.
  std::uint32_t taken_ = 0;
  std::deque<std::uint32_t> notices_;  ///< That are to come: how many have ended then.
  std::size_t unnoticed_ = 0;          ///< The last copies of which no notice tells.
  std::uint64_t unnoticed_bytes_ = 0;
  bool unnotified_ = false;              ///< Copies went out, and the stream will not tell.
  std::chrono::milliseconds looked_{0};  ///< At copies, since the last of them ended.
  ipc::TimePoint looked_at_{};           ///< The last time.
  std::vector<ipc::CopyOp> ops_;         ///< Kept for its memory.
  std::vector<ipc::RowCopyOp> row_ops_;  ///< Likewise.
};

}  // namespace kvferry::cache_manager
