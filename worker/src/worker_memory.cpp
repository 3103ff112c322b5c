// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "worker_memory.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "step_runner.hpp"
#include "weights_store.hpp"

namespace kvferry::worker {

using ipc::Deadline;
using ipc::MemoryTag;
using ipc::Result;

Result<std::uint64_t> WorkerMemory::release(MemoryTag tag,
                                            ipc::WeightsBackup backup,
                                            Deadline deadline) {
  // No step works on any of it from here on.
  KVFERRY_ASSIGN(const std::uint64_t scratch,
                 runner_.run([tag](StepRunner& runner) { return runner.release(tag); }, deadline));
  if (tag != MemoryTag::kWeights || weights_ == nullptr) return scratch;
  auto released = weights_->release(backup, deadline);
  if (!released) {
    const auto back =
        runner_.run([tag](StepRunner& runner) { return runner.resume(tag); }, deadline);
    if (!back) ipc::log_error("steps are still refused: {}", back.error().to_string());
  }
  return released;
}

Result<std::uint64_t> WorkerMemory::resume(MemoryTag tag, Deadline deadline) {
  std::uint64_t weights = 0;
  if (tag == MemoryTag::kWeights && weights_ != nullptr) {
    KVFERRY_ASSIGN(weights, weights_->resume(deadline));
  }
  KVFERRY_ASSIGN(const std::uint64_t scratch,
                 runner_.run([tag](StepRunner& runner) { return runner.resume(tag); }, deadline));
  return weights + scratch;
}

}  // namespace kvferry::worker
