// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/rank/memory_user.hpp"

#include <cstdint>
#include <functional>

namespace kvferry::worker {

class StepRunner;
class WeightsStore;

/// The reference worker's memory beside the arena: weights, and what its runner computes with.
/// While any of it is released the runner refuses steps. @threading as MemoryUser.
class WorkerMemory final : public ipc::MemoryUser {
 public:
  /// Runs a call on the runner's thread, or drops it when the runner is gone.
  using Post = std::function<void(std::function<void(StepRunner&)>)>;

  /// weights: null for none.
  WorkerMemory(WeightsStore* weights, Post post) : weights_(weights), post_(std::move(post)) {}

  [[nodiscard]] ipc::Result<std::uint64_t> release(ipc::MemoryTag tag,
                                                   ipc::WeightsBackup backup,
                                                   ipc::Deadline deadline) override;
  [[nodiscard]] ipc::Result<std::uint64_t> resume(ipc::MemoryTag tag,
                                                  ipc::Deadline deadline) override;

 private:
  using Call = std::function<ipc::Result<std::uint64_t>(StepRunner&)>;
  [[nodiscard]] ipc::Result<std::uint64_t> on_runner(const Call& call,
                                                     ipc::Deadline deadline) const;

  WeightsStore* const weights_;
  const Post post_;
};

}  // namespace kvferry::worker
