// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/rank/memory_user.hpp"
#include "runner_calls.hpp"

#include <cstdint>

namespace kvferry::worker {

class WeightsStore;

/// The reference worker's memory beside the arena: weights, and what its runner computes with.
/// While any of it is released the runner refuses steps. @threading as MemoryUser.
class WorkerMemory final : public ipc::MemoryUser {
 public:
  /// weights: null for none.
  WorkerMemory(WeightsStore* weights, const RunnerCalls& runner)
      : weights_(weights), runner_(runner) {}

  [[nodiscard]] ipc::Result<std::uint64_t> release(ipc::MemoryTag tag,
                                                   ipc::WeightsBackup backup,
                                                   ipc::Deadline deadline) override;
  [[nodiscard]] ipc::Result<std::uint64_t> resume(ipc::MemoryTag tag,
                                                  ipc::Deadline deadline) override;

 private:
  WeightsStore* const weights_;
  const RunnerCalls& runner_;
};

}  // namespace kvferry::worker
