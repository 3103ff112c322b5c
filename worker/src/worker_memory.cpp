// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "worker_memory.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "step_runner.hpp"
#include "weights_store.hpp"

#include <atomic>
#include <future>
#include <memory>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::MemoryTag;
using ipc::Result;

namespace {

/// A call that its caller no longer waits for has not run and never will.
struct Handover {
  std::promise<Result<std::uint64_t>> done;
  std::atomic<bool> taken{false};
};

}  // namespace

Result<std::uint64_t> WorkerMemory::on_runner(const Call& call, Deadline deadline) const {
  auto handover = std::make_shared<Handover>();
  // wait-none: below
  std::future<Result<std::uint64_t>> done = handover->done.get_future();
  post_([handover, call](StepRunner& runner) {
    if (!handover->taken.exchange(true)) handover->done.set_value(call(runner));
  });
  // wait: the runner's thread to take the call, which it does between two steps; deadline, of
  // the release or resume; its end breaks the promise
  const bool in_time = done.wait_for(deadline.remaining()) == std::future_status::ready;
  if (!in_time && !handover->taken.exchange(true)) {
    return KVFERRY_ERROR(kTimeout, "the worker's step loop did not take it by the deadline");
  }
  handover.reset();
  try {
    return done.get();
  } catch (const std::future_error&) {
    return KVFERRY_ERROR(kCancelled, "the worker's step loop has ended");
  }
}

Result<std::uint64_t> WorkerMemory::release(MemoryTag tag,
                                            ipc::WeightsBackup backup,
                                            Deadline deadline) {
  // No step works on any of it from here on.
  KVFERRY_ASSIGN(const std::uint64_t scratch,
                 on_runner([tag](StepRunner& runner) { return runner.release(tag); }, deadline));
  if (tag != MemoryTag::kWeights || weights_ == nullptr) return scratch;
  auto released = weights_->release(backup, deadline);
  if (!released) {
    const auto back = on_runner([tag](StepRunner& runner) { return runner.resume(tag); }, deadline);
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
                 on_runner([tag](StepRunner& runner) { return runner.resume(tag); }, deadline));
  return weights + scratch;
}

}  // namespace kvferry::worker
