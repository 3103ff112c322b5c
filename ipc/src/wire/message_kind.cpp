// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/wire/messages.hpp"

namespace kvferry::ipc {

std::string_view to_string(MessageKind kind) noexcept {
  switch (kind) {
    case MessageKind::kEngineHello: return "engine_hello";
    case MessageKind::kLookup: return "lookup";
    case MessageKind::kUsePrefix: return "use_prefix";
    case MessageKind::kPin: return "pin";
    case MessageKind::kUnpin: return "unpin";
    case MessageKind::kReserveStore: return "reserve_store";
    case MessageKind::kAbandonStore: return "abandon_store";
    case MessageKind::kSubmitStore: return "submit_store";
    case MessageKind::kSubmitLoad: return "submit_load";
    case MessageKind::kCancel: return "cancel";
    case MessageKind::kSwapOut: return "swap_out";
    case MessageKind::kSwapIn: return "swap_in";
    case MessageKind::kDropSequence: return "drop_sequence";
    case MessageKind::kClear: return "clear";
    case MessageKind::kReinit: return "reinit";
    case MessageKind::kPause: return "pause";
    case MessageKind::kContinue: return "continue";
    case MessageKind::kFlush: return "flush";
    case MessageKind::kUpdateWeights: return "update_weights";
    case MessageKind::kWeightsPart: return "weights_part";
    case MessageKind::kStatus: return "status";
    case MessageKind::kJobDone: return "job_done";
    case MessageKind::kEngineState: return "engine_state";
    case MessageKind::kSchedule: return "schedule";
    case MessageKind::kRankHello: return "rank_hello";
    case MessageKind::kRankState: return "rank_state";
    case MessageKind::kRankClear: return "rank_clear";
    case MessageKind::kRankReinit: return "rank_reinit";
    case MessageKind::kRankEmpty: return "rank_empty";
    case MessageKind::kRankWeights: return "rank_weights";
    case MessageKind::kRankWeightsPart: return "rank_weights_part";
    case MessageKind::kQuiesceStaging: return "quiesce_staging";
    case MessageKind::kMoverJob: return "mover_job";
    case MessageKind::kMoverCancel: return "mover_cancel";
    case MessageKind::kMoverJobDone: return "mover_job_done";
    case MessageKind::kStepHello: return "step_hello";
    case MessageKind::kStep: return "step";
    case MessageKind::kDecode: return "decode";
    case MessageKind::kWorkerMemory: return "worker_memory";
    case MessageKind::kGenerate: return "generate";
    case MessageKind::kBye: return "bye";
    case MessageKind::kRankWeightsRead: return "rank_weights_read";
    case MessageKind::kReleaseMemory: return "release_memory";
    case MessageKind::kResumeMemory: return "resume_memory";
    case MessageKind::kRankRelease: return "rank_release";
    case MessageKind::kRankResume: return "rank_resume";
    case MessageKind::kComponents: return "components";
    case MessageKind::kRankComponents: return "rank_components";
    case MessageKind::kRankBroadcast: return "rank_broadcast";
    case MessageKind::kLayersFailed: return "layers_failed";
    case MessageKind::kMoverSums: return "mover_sums";
    case MessageKind::kOfferStore: return "offer_store";
    case MessageKind::kTellSums: return "tell_sums";
    case MessageKind::kKeptSums: return "kept_sums";
    case MessageKind::kPinBlocks: return "pin_blocks";
    case MessageKind::kUnpinBlocks: return "unpin_blocks";
  }
  return "invalid";
}

std::string_view to_string(PauseMode mode) noexcept {
  switch (mode) {
    case PauseMode::kAbort: return "abort";
    case PauseMode::kRetract: return "retract";
    case PauseMode::kInPlace: return "in_place";
  }
  return "invalid";
}

}  // namespace kvferry::ipc
