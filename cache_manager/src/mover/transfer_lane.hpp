// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/transitions/transition_log.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "mover/copy_plan.hpp"
#include "mover/held_answers.hpp"
#include "mover/pool_mapping.hpp"
#include "mover/staging_client.hpp"
#include "mover/stop_reason.hpp"
#include "mover/stream_wait.hpp"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace kvferry::cache_manager {

/// The mapped epoch as a lane needs it. Valid from on_mapped until quiesce has returned ok.
struct MappedArena {
  const ipc::Arena* arena = nullptr;
  ipc::SessionId session;
  BlockParts parts;
  CopyStrategy strategy = CopyStrategy::kBatch;  ///< Resolved, never kAuto.
  explicit MappedArena(const ipc::Arena& mapped) : arena(&mapped), parts(mapped.layout()) {}
};

/// A job on its way through a lane.
struct LaneJob {
  ipc::MoverJob job;
  std::shared_ptr<const MappedArena> arena;
  std::shared_ptr<PoolMapping> pool;
  ipc::TimePoint submitted;
};

/// Moves blocks in one direction: a thread, a stream and a staging connection of its own, so that
/// loads and stores run at the same time. Jobs run one after another, higher priority first, but
/// every kFairShare-th is the oldest. A job whose hand-overs to the worker were abandoned is
/// answered only once the worker is proven to have ended them; jobs that need no staging run on
/// meanwhile. A job whose stream fails, or hangs for device_hang, is never answered: nothing tells
/// any more whether its copies still write, until this process is dead. The lane runs nothing after
/// it.
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
  /// Ends all queued jobs with this code. With kRevoked the running one abandons its hand-overs to
  /// the worker and ends as soon as its own copies have; with another code it starts nothing new.
  void revoke(ipc::ErrorCode code);
  /// Ok when nothing is queued or runs before the deadline: this process touches neither arena nor
  /// pool any more. Answers may still be held for the worker's sake. kTimeout; the device's own
  /// error, at once, when the stream has failed: it cannot be shown to be idle.
  [[nodiscard]] ipc::Status wait_idle(ipc::Deadline deadline);
  /// Nothing is queued or runs, and every job was answered.
  [[nodiscard]] bool idle();

 private:
  void run();
  [[nodiscard]] LaneJob take_next();  ///< @pre mutex_ is held and queue_ not empty.
  void execute(LaneJob& job);
  /// kTimeout: the device hangs.
  [[nodiscard]] ipc::Status run_direct(LaneJob& job,
                                       std::span<const ipc::MoverItem> items,
                                       std::span<const std::size_t> index,
                                       ipc::MoverJobDone& result);
  [[nodiscard]] ipc::Status enqueue(const LaneJob& job,
                                    std::span<const CopyRun> runs,
                                    ipc::DevicePtr slot,
                                    bool staged);
  void release_held();
  void fail_stream(ipc::JobId job, const ipc::Error& error);
  [[nodiscard]] std::optional<ipc::ErrorCode> stop_reason(ipc::JobId job);
  void finish(ipc::MoverJobDone result);

  ipc::Device& device_;
  Options options_;
  Done done_;
  std::function<void(const ipc::Error&)> device_failed_;
  ipc::EventFd copied_;   // counts notify()s of the stream
  ipc::EventFd stopped_;  // signalled by cancel and revoke
  // After the eventfds: its destructor may still signal them.
  std::unique_ptr<ipc::Stream> stream_;
  ipc::EventFd wanted_;    // signalled when the lane's thread has more to do than to wait for proof
  StagingClient staging_;  // lane thread only
  HeldAnswers held_;       // lane thread only

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::deque<LaneJob> queue_;
  std::uint32_t taken_ = 0;
  bool stopping_ = false;
  bool running_ = false;
  bool holding_ = false;  ///< held_ is not empty.
  ipc::JobId running_job_;
  StopReason stop_running_;
  std::optional<ipc::Error> stream_failure_;

  std::optional<ipc::OwnThread> thread_;  // last: starts when all above exists
};

}  // namespace kvferry::cache_manager
