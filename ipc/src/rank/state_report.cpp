// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "rank/state_report.hpp"

namespace kvferry::ipc {

RankState StateReport::make(const LeaseView& view,
                            const Digest& weights,
                            MemoryTags released,
                            bool weights_lost) {
  RankState state;
  state.session = view.session;
  state.epoch = view.epoch;
  state.phase = view.phase;
  state.mapped = view.mapped;
  state.prepared_by = view.prepared_by;
  state.group_blocks = view.group_blocks;
  state.lease_holders = view.lease_holders;
  state.quarantined_bytes = view.quarantined_bytes;
  state.note = view.note;
  state.weights = weights;
  state.released = released;
  state.weights_lost = weights_lost;
  look_at_memory(view);
  if (memory_) {
    state.device_free_bytes = memory_->free_bytes;
    state.device_total_bytes = memory_->total_bytes;
  }
  return state;
}

// Ours changes with the phase and with what quarantine gives back; a view changes more often than
// that, and a look is not free: on the host backend it waits for a grace period of the kernel.
void StateReport::look_at_memory(const LeaseView& view) {
  if (memory_ && phase_ == view.phase && epoch_ == view.epoch &&
      quarantined_bytes_ == view.quarantined_bytes) {
    return;
  }
  const auto memory = device_.memory_info();
  if (!memory) return;
  memory_ = *memory;
  phase_ = view.phase;
  epoch_ = view.epoch;
  quarantined_bytes_ = view.quarantined_bytes;
}

}  // namespace kvferry::ipc
