// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "mover/copy_plan.hpp"
#include "mover/stream_wait.hpp"
#include "mover/transfer_lane.hpp"

#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace kvferry::cache_manager {

/// Marks items of a job as failed; the first message is kept.
void fail_items(ipc::MoverJobDone& result,
                std::span<const std::size_t> items,
                ipc::ErrorCode code,
                std::string_view message);
/// One job by cooperative staging: the worker's agent gathers (scatters) blocks into (out of) ring
/// slots in its own process, this side moves the slots by copy engine. Several slots are under way
/// at once. Store: gather, copy, done. Load: copy, scatter, done.
///
/// A hand-over that is abandoned (revoke, lost connection, dead worker) fails its blocks and is not
/// waited for here: the staging client is in debt for it then. A copy of ours is always waited for.
class StagedRun {
 public:
  struct Context {
    ipc::CopyDirection direction;
    std::uint32_t lane;
    ipc::Stream& stream;
    const ipc::EventFd& copied;
    const ipc::EventFd& stopped;
    StagingClient& staging;
    const ipc::TransitionLog& transitions;
    std::function<ipc::Status(std::span<const CopyRun>, ipc::DevicePtr)> enqueue;
    std::function<std::optional<ipc::ErrorCode>()> stop_reason;
    std::function<void()> on_greeted;  ///< The agent serves: what was asked of it before has ended.
    std::chrono::milliseconds device_hang = kDeviceHang;
  };

  StagedRun(Context context,
            const LaneJob& job,
            std::span<const ipc::MoverItem> items,
            std::span<const std::size_t> index,
            ipc::MoverJobDone& result);
  /// kTimeout: the device hangs, and copies of the job may still write.
  [[nodiscard]] ipc::Status run();
  /// False when hand-overs were abandoned: the worker may still touch the blocks and ring slots of
  /// this job, so that its answer must wait for the staging client's debt.
  [[nodiscard]] bool proven() const noexcept { return proven_; }

 private:
  struct InFlight {
    std::size_t chunk = 0;
    std::uint32_t slot = 0;
  };

  [[nodiscard]] bool stores() const noexcept {
    return context_.direction == ipc::CopyDirection::kDeviceToHost;
  }
  [[nodiscard]] bool finished() const noexcept {
    return next_ == chunks_.size() && staging_.empty() && copying_.empty();
  }
  void prepare();
  void start_chunks();
  void ask_worker(InFlight work);
  void copy(InFlight work);
  void wait_for_progress();
  void take_replies();
  void take_copies(std::uint64_t count);
  void stop_if_asked();
  void abandon_staging(ipc::ErrorCode code, std::string_view message);
  void fail_chunk(std::size_t chunk, ipc::ErrorCode code, std::string_view message);
  /// What a step of this job is about; detail: the chunk, the hand-over or the lane.
  [[nodiscard]] ipc::TransitionFields step(std::uint64_t detail) const noexcept {
    return {.job = job_.job.job, .detail = detail};
  }

  Context context_;
  const LaneJob& job_;
  std::span<const std::size_t> index_;
  ipc::MoverJobDone& result_;
  std::vector<StagedChunk> chunks_;
  std::size_t next_ = 0;
  std::vector<std::uint32_t> free_slots_;
  std::map<std::uint64_t, InFlight> staging_;  ///< By request id: the worker has it.
  std::deque<InFlight> copying_;               ///< In stream order: our stream has it.
  std::optional<ipc::ErrorCode> abandoned_;    ///< Why, once hand-overs were given up.
  std::chrono::milliseconds looked_{0};        ///< At copies, since the last of them ended.
  bool proven_ = true;                         ///< No hand-over was abandoned unanswered.
  /// The chunk whose copies went out without that the stream will tell their end by itself.
  std::optional<std::size_t> unnotified_;
};

}  // namespace kvferry::cache_manager
