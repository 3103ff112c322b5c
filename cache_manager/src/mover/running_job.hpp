// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "mover/lane_job.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace kvferry::cache_manager {

class RunningJob;

/// A part of a job that is under way.
struct Chunk {
  PlannedChunk plan;
  RunningJob* job = nullptr;
  std::uint64_t number = 0;                   ///< In its job, from 1.
  std::uint32_t slot = 0;                     ///< Staged only.
  std::optional<ipc::TimePoint> asked_alone;  ///< When the worker had nothing else of us.
  bool is_marked = false;                     ///< The stream writes a word when it has ended.
  bool failed = false;
};

/// What planning a job takes: of one that is over it serves the next, which then takes none.
struct PlanMemory {
  CopyPlanner planner;
  std::vector<std::unique_ptr<Chunk>> chunks;
  std::vector<Chunk*> spare;  ///< Of these, those that are not under way.
};

/// A job that has begun: which of its chunks are under way, and what became of its items.
/// @threading the lane's thread. @lifetime its chunks are used no longer than it.
class RunningJob {
 public:
  /// Checks the items: those that cannot be copied fail here.
  explicit RunningJob(LaneJob job, PlanMemory memory = {});

  [[nodiscard]] ipc::JobId id() const noexcept { return job_.job.job; }
  [[nodiscard]] const ipc::Urgency& urgency() const noexcept { return job_.job.urgency; }
  [[nodiscard]] const LaneJob& job() const noexcept { return job_; }
  [[nodiscard]] CopyStrategy strategy() const noexcept { return job_.strategy; }
  [[nodiscard]] bool is_staged() const noexcept { return strategy() == CopyStrategy::kStaged; }
  /// Goes in step with the worker's compute.
  [[nodiscard]] bool is_layered() const noexcept { return job_.job.layers.has_value(); }
  /// The worker's agent copies it.
  [[nodiscard]] bool is_agents() const noexcept { return strategy() == CopyStrategy::kAgent; }
  /// The worker has a part in each chunk of it.
  [[nodiscard]] bool hands_over() const noexcept {
    return is_staged() || is_layered() || is_agents();
  }

  /// Some of it has not been started.
  [[nodiscard]] bool has_next() const noexcept { return memory_.planner.has_next(); }
  /// bytes: that end it, where it is not staged. @pre has_next().
  [[nodiscard]] Chunk& start_next(std::uint64_t bytes);
  /// Nothing touches the chunk's blocks any more, or its hand-over was abandoned.
  void end(Chunk& chunk);
  /// Nothing of it is under way, and nothing will be.
  [[nodiscard]] bool is_over() const noexcept { return !has_next() && under_way_ == 0; }

  /// The first message is kept.
  void fail(Chunk& chunk, ipc::ErrorCode code, std::string_view message);
  /// Some item of it failed.
  [[nodiscard]] bool has_failed() const noexcept { return !result_.message.empty(); }
  /// Nothing of it has been copied, nor is under way: another strategy takes it from the beginning.
  void begin_anew(CopyStrategy strategy);
  [[nodiscard]] bool has_started() const noexcept { return started_ > 0; }
  [[nodiscard]] bool is_only_chunk() const noexcept { return started_ == 1 && !has_next(); }
  /// What has not been started will not be.
  void fail_rest(ipc::ErrorCode code, std::string_view message);
  /// A hand-over to the worker was given up: nobody here knows when it ends.
  void abandon(ipc::ErrorCode code) noexcept { abandoned_ = code; }
  [[nodiscard]] std::optional<ipc::ErrorCode> abandoned() const noexcept { return abandoned_; }
  void set_unproven() noexcept { proven_ = false; }
  /// False when hand-overs were abandoned: the worker may still touch the blocks and ring slots of
  /// this job, so that its answer must wait for the staging client's debt.
  [[nodiscard]] bool proven() const noexcept { return proven_; }

  /// The answer. @pre is_over().
  [[nodiscard]] ipc::MoverJobDone take_result();
  /// For another job, at this one's end.
  [[nodiscard]] PlanMemory take_memory() noexcept { return std::move(memory_); }

 private:
  void plan();

  LaneJob job_;
  ipc::TimePoint began_;
  ipc::MoverJobDone result_;
  PlanMemory memory_;
  std::uint64_t started_ = 0;
  std::size_t under_way_ = 0;
  std::optional<ipc::ErrorCode> abandoned_;
  bool proven_ = true;
};

}  // namespace kvferry::cache_manager
