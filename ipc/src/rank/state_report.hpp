// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <optional>

namespace kvferry::ipc {

/// What the manager is told of this rank: the lease's picture and the device memory that goes with
/// it. @threading the loop's thread.
class StateReport {
 public:
  explicit StateReport(Device& device) : device_(device) {}

  [[nodiscard]] RankState make(const LeaseView& view,
                               const Digest& weights,
                               MemoryTags released,
                               bool weights_lost);
  /// Somebody else looked just now.
  void set_memory(const MemoryInfo& memory) { memory_ = memory; }
  /// The next report looks again: it goes to another manager.
  void forget_memory() { memory_.reset(); }

 private:
  void look_at_memory(const LeaseView& view);

  Device& device_;
  std::optional<MemoryInfo> memory_;  ///< As last told to the manager, in the state below.
  LeasePhase phase_ = LeasePhase::kVacant;
  Epoch epoch_;
  std::uint64_t quarantined_bytes_ = 0;
};

}  // namespace kvferry::ipc
