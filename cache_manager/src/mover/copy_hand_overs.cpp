// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What a CopyPipeline asks of the worker's agent.
#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "mover/copy_pipeline.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {

using ipc::ErrorCode;
using ipc::Status;
using ipc::Transition;

bool CopyPipeline::goes_otherwise(const RunningJob& job, ErrorCode code) noexcept {
  return job.is_agents() && job.job().arena->chooser != nullptr && code != ErrorCode::kRevoked &&
         code != ErrorCode::kStaleEpoch && code != ErrorCode::kNotReady;
}

void CopyPipeline::begin_otherwise(RunningJob& job, const ipc::Error& error) {
  job.begin_anew(choose(job.job(), /*alone=*/true, /*agent=*/false));
  ipc::log_warn("job {}: the worker does not copy it ({}), {} does", job.id().value,
                error.to_string(), to_string(job.strategy()));
}

ipc::StageRequest CopyPipeline::request_of(const Chunk& chunk) const {
  const LaneJob& job = chunk.job->job();
  ipc::StageRequest request;
  request.session = job.arena->session;
  request.epoch = job.arena->arena->epoch();
  request.group = chunk.plan.group;
  request.is_ahead = !stores() && chunk.job->urgency().priority <= ipc::Urgency::kAhead;
  if (chunk.job->is_agents()) {
    request.kind = stores() ? ipc::StageKind::kStore : ipc::StageKind::kLoad;
    request.blocks = chunk.plan.blocks;
    for (const PackedRun& run : chunk.plan.packed) {
      request.parts.push_back({run.set, static_cast<std::uint32_t>(run.first),
                               static_cast<std::uint32_t>(run.count), run.pool_offset});
    }
    return request;
  }
  request.kind = stores() ? ipc::StageKind::kGather : ipc::StageKind::kScatter;
  request.set = chunk.plan.set;
  request.slot = chunk.slot;
  if (chunk.job->is_staged()) request.blocks = chunk.plan.blocks;
  if (request.blocks.empty()) {  // the worker only says, or is told, how far it is
    request.kind = stores() ? ipc::StageKind::kAwait : ipc::StageKind::kPublish;
    request.group = {};
    request.set = ipc::RegionSet::kAll;
  }
  if (const auto& layers = chunk.job->job().job.layers) {
    // A gather waits for all that it reads, though not all of it may be there with it.
    const std::uint32_t through = stores() ? chunk.plan.range.end : chunk.plan.through;
    request.layers = {*layers, chunk.plan.range, through, chunk.plan.last};
  }
  return request;
}

void CopyPipeline::ask_worker(Chunk& chunk) {
  // Before the number is known that the request will have.
  const Status lent =
      chunk.job->is_agents() ? context_.staging.lend(chunk.job->job().pool) : ipc::ok();
  const std::uint64_t next = context_.staging.next_id();
  const Status planned = context_.transitions.attempt(Transition::kMoverAsk, step(chunk, next));
  const Status may_ask = planned ? lent : planned;
  const auto id = may_ask ? context_.staging.request(request_of(chunk))
                          : ipc::Result<std::uint64_t>(may_ask.error());
  if (!id) {
    // It never left.
    context_.transitions.record(Transition::kMoverSeesHandOver, step(chunk, next));
    chunk.job->fail(chunk, id.error().code, id.error().message);
    RunningJob& asking = *chunk.job;
    end(chunk);
    if (planned && id.error().code != ErrorCode::kInvalidArgument) {
      abandon(id.error().code, id.error().message);  // the connection is lost
    } else {
      asking.fail_rest(id.error().code, id.error().message);
    }
    return;
  }
  // How long compute takes is no cost of a hand-over, nor is a copy.
  const bool is_measured = chunk.job->is_staged() && !chunk.job->is_layered();
  if (asked_.empty() && is_measured) chunk.asked_alone = ipc::MonotonicClock::now();
  asked_.emplace(*id, &chunk);
}

void CopyPipeline::take_replies() {
  while (!asked_.empty()) {
    auto reply = context_.staging.try_receive();
    if (!reply) {
      abandon(reply.error().code, reply.error().message);
      return;
    }
    if (!reply->has_value()) return;
    const auto found = asked_.find((*reply)->id);
    KVFERRY_CHECK(found != asked_.end(), "a reply to a hand-over of another job");
    Chunk& chunk = *found->second;
    asked_.erase(found);
    context_.transitions.record(Transition::kMoverSeesHandOver, step(chunk, (*reply)->id));
    if ((*reply)->error) {
      fail_hand_over(chunk, *(*reply)->error);
      continue;
    }
    if (chunk.asked_alone) {
      const ipc::TimePoint now = ipc::MonotonicClock::now();
      hand_overs_.add(chunk.plan.size_bytes, now - *chunk.asked_alone, now);
    }
    if (stores() && !chunk.job->is_agents()) {
      copy(chunk);
    } else {
      end(chunk);
    }
  }
}

void CopyPipeline::fail_hand_over(Chunk& chunk, const ipc::Error& error) {
  RunningJob& job = *chunk.job;
  if (job.is_agents()) context_.staging.set_refuses_pools();
  const bool otherwise = job.is_only_chunk() && goes_otherwise(job, error.code);
  if (otherwise) {
    chunk.failed = true;  // nothing of it counts
  } else {
    job.fail(chunk, error.code, error.message);
  }
  end(chunk);
  if (otherwise) begin_otherwise(job, error);
}

// Slots of hand-overs that were abandoned are free at once: nothing is put into one before the
// agent has greeted anew, which it does when nothing that it was asked runs any more.
void CopyPipeline::abandon(ErrorCode code, std::string_view message) {
  for (const auto& job : jobs_) {
    if (!job->hands_over()) continue;
    job->abandon(code);
    job->fail_rest(code, message);
    const auto handed_over = std::count_if(asked_.begin(), asked_.end(), [&job](const auto& entry) {
      return entry.second->job == job.get();
    });
    if (handed_over == 0) continue;
    job->set_unproven();
    context_.transitions.record(Transition::kMoverAbandon,
                                {.job = job->id(), .detail = context_.lane});
    ipc::log_warn("job {}: {} hand-overs to the worker (pid {}) abandoned: {}", job->id().value,
                  handed_over, context_.staging.agent().pid(), message);
  }
  for (const auto& [id, chunk] : std::exchange(asked_, {})) {
    chunk->job->fail(*chunk, code, message);
    end(*chunk);
  }
  for (Chunk* chunk : std::exchange(unchecked_, {})) {
    chunk->job->fail(*chunk, code, message);
    end(*chunk);
  }
  // Closing tells the agent to drop what it has not begun.
  context_.staging.disconnect();
}

}  // namespace kvferry::cache_manager
