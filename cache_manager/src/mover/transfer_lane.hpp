// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "mover/copy_pipeline.hpp"
#include "mover/held_answers.hpp"
#include "mover/lane_job.hpp"
#include "mover/rate_budget.hpp"
#include "mover/staging_client.hpp"
#include "mover/stop_reason.hpp"
#include "mover/stream_wait.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace kvferry::cache_manager {

/// Moves blocks in one direction: a thread, a stream and a staging connection of its own, so that
/// loads and stores run at the same time. Chunks of jobs go one after another, those of the better
/// job first, but every kFairShare-th is of the oldest. A job whose hand-overs to the worker were
/// abandoned is answered only once the worker is proven to have ended them; jobs that need no
/// staging run on meanwhile. Jobs whose stream fails, or hangs for device_hang, are never answered:
/// nothing tells any more whether their copies still write, until this process is dead. The lane
/// runs nothing after it.
/// @threading all public calls from any thread.
class TransferLane {
 public:
  using Done = std::function<void(ipc::MoverJobDone)>;
  static constexpr std::uint32_t kFairShare = 8;

  struct Options {
    ipc::CopyDirection direction = ipc::CopyDirection::kDeviceToHost;
    StagingClient::Options staging;
    std::uint32_t lane = 0;  ///< 0 or 1: which half of the staging ring is ours.
    ipc::TransitionLog transitions = {};
    std::chrono::milliseconds device_hang = kDeviceHang;
    /// Of what is begun; 0: no limit. Jobs above Urgency::kAhead do not wait for it, and count.
    std::uint64_t bytes_per_second = 0;
    UrgentLoads urgent_loads = UrgentLoads::kAuto;
  };

  /// done is called on the lane's thread, or on the caller's for jobs that end while queued.
  /// device_failed is called once, on the lane's thread: this process should end.
  /// Throws Exception when the stream cannot be made.
  TransferLane(ipc::Device& device,
               Options options,
               Done done,
               std::function<void(const ipc::Error&)> device_failed);
  TransferLane(const TransferLane&) = delete;
  TransferLane& operator=(const TransferLane&) = delete;
  ~TransferLane();

  void submit(LaneJob job);
  /// Ends a queued job as kCancelled; one that runs stops before its next chunk.
  void cancel(ipc::JobId job);
  /// Ends all queued jobs with this code. With kRevoked those that run abandon their hand-overs to
  /// the worker and end as soon as their own copies have; with another code they start nothing new.
  void revoke(ipc::ErrorCode code);
  /// The worker lets go of a pool that was lent to it. After revoke(): no job of it goes on.
  void take_pool_back();
  /// Connects to the worker's agent while there is nothing else to do, so that it is known whether
  /// the worker computes.
  void greet();
  /// At loads that waited for a check: it was decided.
  void look_again() { wanted_.signal(); }
  /// What the worker says of its compute; nothing: it has not been greeted, or says nothing.
  [[nodiscard]] std::optional<bool> is_computing() const { return staging_.was_computing(); }
  /// Ok when nothing is queued or runs before the deadline: this process touches neither arena nor
  /// pool any more. Answers may still be held for the worker's sake. kTimeout; the device's own
  /// error, at once, when the stream has failed: it cannot be shown to be idle.
  [[nodiscard]] ipc::Status wait_idle(ipc::Deadline deadline);
  /// Nothing is queued or runs, and every job was answered.
  [[nodiscard]] bool idle();

 private:
  static void expect(const LaneJob& job);
  void run();
  /// False: the lane ends.
  [[nodiscard]] bool wait_for_work();
  void apply_stops();
  [[nodiscard]] bool is_to_take_back();
  void greet_if_idle();
  void start_chunks();
  /// Of the job whose turn it is; false: not now.
  [[nodiscard]] bool start_chunk(bool fair);
  /// Some job is more than fetched ahead, and not all of it has started.
  [[nodiscard]] bool is_waited_for();
  /// Until when this job's next chunk waits for the budget; nothing: it need not.
  [[nodiscard]] std::optional<ipc::TimePoint> paced_until(const RunningJob& job);
  /// The job whose chunk is next, begun if need be; null when there is none. fair: the oldest.
  [[nodiscard]] RunningJob* choose(bool fair);
  /// The queued job to begin before any more of this one; queue_.end(): none.
  [[nodiscard]] std::deque<LaneJob>::iterator better_queued(const RunningJob* running, bool fair);
  void answer_ended();
  void answer(std::unique_ptr<RunningJob> job);
  void release_held();
  void fail_stream(const ipc::Error& error);
  /// Answers a job that has not begun.
  void refuse(const ipc::MoverJob& job, const ipc::Error& error);
  void finish(ipc::MoverJobDone result);

  Options options_;
  Done done_;
  std::function<void(const ipc::Error&)> device_failed_;
  std::unique_ptr<ipc::PinnedBuffer> words_;  // of the stream
  ipc::EventFd copied_;                       // counts notify()s of the stream
  ipc::EventFd stopped_;                      // signalled by cancel and revoke
  // After the eventfds: its destructor may still signal them.
  std::unique_ptr<ipc::Stream> stream_;
  ipc::EventFd wanted_;    // signalled when the lane's thread has more to do than to wait
  StagingClient staging_;  // lane thread only, with the next three
  HeldAnswers held_;
  std::optional<CopyPipeline> pipeline_;
  std::uint32_t started_ = 0;            ///< Chunks since the oldest job's turn.
  std::optional<ipc::TimePoint> paced_;  ///< More may be started then.
  RateBudget budget_;                    // lane thread only

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<LaneJob> queue_;
  std::map<ipc::JobId, StopReason> running_;  ///< Begun, and not answered or held.
  bool stopping_ = false;
  bool holding_ = false;  ///< held_ is not empty.
  bool takes_back_ = false;
  bool greets_ = false;
  std::optional<ipc::Error> stream_failure_;

  std::optional<ipc::OwnThread> thread_;  // last: starts when all above exists
};

}  // namespace kvferry::cache_manager
