// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "transitions/job_walks.hpp"

#include <fmt/format.h>

namespace kvferry::ipc {
namespace {

using relation::Machine;
using relation::State;
using relation::Walk;

std::string_view rule_of(Machine machine, Transition transition) noexcept {
  switch (transition) {
    case Transition::kMoverAnswer: return "AnsweredOnce";
    case Transition::kManagerEnd: return "EndedOnce";
    case Transition::kStagingAnswer: return "HandedOverMeansEnded";
    default: break;
  }
  switch (machine) {
    case Machine::kEngineJob: return "EngineJobRelation";
    case Machine::kJob: return "JobRelation";
    case Machine::kPart: return "PartRelation";
    case Machine::kMoverJob: return "MoverJobRelation";
    case Machine::kCopy: return "CopyRelation";
    case Machine::kHandOver: return "HandOverRelation";
    default: return "LaunchRelation";
  }
}

/// About all hand-overs of a job or a lane, not one that it names.
bool is_of_many(Transition transition) noexcept {
  return transition == Transition::kMoverAbandon || transition == Transition::kMoverProof ||
         transition == Transition::kMoverSeesDeath;
}

}  // namespace

JobWalks::Key JobWalks::key_of(Machine machine, const TransitionRecord& record) {
  switch (machine) {
    case Machine::kPart: return {machine, record.writer, record.job.value, record.peer};
    case Machine::kLaunch:
    case Machine::kCopy:
    case Machine::kHandOver: return {machine, record.writer, record.job.value, record.detail};
    default: return {machine, record.writer, record.job.value, 0};
  }
}

std::optional<JobWalks::Stray> JobWalks::take(const TransitionRecord& record, bool lost_some) {
  const auto machine = relation::machine_of(record.transition);
  if (!machine) return std::nullopt;
  if (is_of_many(record.transition)) {
    move_hand_overs(record);
    return std::nullopt;
  }
  const Walk start(lost_some ? std::nullopt : std::optional(relation::first_state(*machine)));
  Walk& walk = walks_.try_emplace(key_of(*machine, record), start).first->second;
  const std::string_view from = walk.state_name();
  if (walk.take(record.transition, taken_)) return std::nullopt;
  return Stray{rule_of(*machine, record.transition),
               fmt::format("{} in state {} of its {}", to_string(record.transition), from,
                           relation::to_string(*machine))};
}

void JobWalks::move_hand_overs(const TransitionRecord& record) {
  const bool abandons = record.transition == Transition::kMoverAbandon;
  const State from = abandons ? State::kHandOverAsked : State::kHandOverAbandoned;
  const std::uint64_t first_job = abandons ? record.job.value : 0;
  for (auto at = walks_.lower_bound({Machine::kHandOver, record.writer, first_job, 0});
       at != walks_.end() && at->first.machine == Machine::kHandOver &&
       at->first.writer == record.writer && (!abandons || at->first.job == first_job);
       ++at) {
    const bool other_lane =
        record.transition == Transition::kMoverProof && (at->first.part & 1U) != record.detail;
    if (other_lane || at->second.state() != from) continue;
    (void)at->second.take(record.transition, taken_);  // allowed from there
  }
}

}  // namespace kvferry::ipc
