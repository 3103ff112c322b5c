// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/running_job.hpp"

#include <chrono>
#include <utility>

namespace kvferry::cache_manager {

using std::chrono::duration_cast;
using std::chrono::microseconds;

RunningJob::RunningJob(LaneJob job, PlanMemory memory)
    : job_(std::move(job)), began_(ipc::MonotonicClock::now()), memory_(std::move(memory)) {
  result_.job = id();
  result_.results.assign(job_.job.items.size(), 0);
  result_.queued = duration_cast<microseconds>(began_ - job_.submitted);
  const ipc::ArenaLayout& layout = job_.arena->arena->layout();
  for (std::size_t i = 0; i < job_.job.items.size(); ++i) {
    const auto wrong =
        check_item(job_.job.items[i], layout, job_.arena->parts, job_.pool->size_bytes());
    if (!wrong) continue;
    result_.results[i] = static_cast<std::uint8_t>(wrong->code);
    if (result_.message.empty()) result_.message = wrong->message;
  }
  plan();
  // Whoever computes on its layers cannot tell which blocks are there.
  if (is_layered() && has_failed()) {
    fail_rest(ipc::ErrorCode::kInvalidArgument, "another block of the job is wrong");
  }
}

void RunningJob::plan() {
  const ipc::ArenaLayout& layout = job_.arena->arena->layout();
  PlanLimits limits;
  limits.pool_piece_bytes = ipc::PoolMapping::kPieceBytes;
  limits.slot_bytes = is_staged() ? layout.staging.slot_bytes : 0;
  limits.strided = strategy() == CopyStrategy::kStrided;
  limits.kernel = strategy() == CopyStrategy::kKernel || is_agents();
  limits.layered = is_layered();
  memory_.planner.start(job_.arena->parts, job_.job.items, result_.results, limits);
}

void RunningJob::begin_anew(CopyStrategy strategy) {
  job_.strategy = strategy;
  started_ = 0;
  plan();
}

Chunk& RunningJob::start_next(std::uint64_t bytes) {
  if (memory_.spare.empty()) {
    memory_.spare.push_back(memory_.chunks.emplace_back(std::make_unique<Chunk>()).get());
  }
  Chunk& chunk = *memory_.spare.back();
  memory_.spare.pop_back();
  chunk.job = this;
  chunk.number = ++started_;
  chunk.slot = 0;
  chunk.asked_alone.reset();
  chunk.is_marked = false;
  chunk.failed = false;
  memory_.planner.set_chunk_bytes(bytes);
  memory_.planner.plan_next(chunk.plan);
  ++under_way_;
  return chunk;
}

void RunningJob::end(Chunk& chunk) {
  if (!chunk.failed) result_.bytes += chunk.plan.size_bytes;
  --under_way_;
  memory_.spare.push_back(&chunk);
}

void RunningJob::fail(Chunk& chunk, ipc::ErrorCode code, std::string_view message) {
  chunk.failed = true;
  for (const std::size_t item : chunk.plan.items) {
    result_.results[item] = static_cast<std::uint8_t>(code);
  }
  if (result_.message.empty()) result_.message = message;
  if (is_layered()) fail_rest(code, message);
}

void RunningJob::fail_rest(ipc::ErrorCode code, std::string_view message) {
  if (has_next() && result_.message.empty()) result_.message = message;
  memory_.planner.drop_rest(
      [this, code](std::size_t item) { result_.results[item] = static_cast<std::uint8_t>(code); });
}

ipc::MoverJobDone RunningJob::take_result() {
  result_.copied = duration_cast<microseconds>(ipc::MonotonicClock::now() - began_);
  return std::move(result_);
}

}  // namespace kvferry::cache_manager
