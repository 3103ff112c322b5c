// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "worker_components.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "step_runner.hpp"

#include <algorithm>
#include <chrono>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::Status;

namespace {

/// A launch takes milliseconds; one that takes longer hangs with its device.
constexpr std::chrono::seconds kRests{5};

}  // namespace

WorkerComponents::WorkerComponents(CachingAllocator& allocator,
                                   WeightsStore* weights,
                                   const std::atomic<std::uint64_t>& graph_bytes,
                                   const RunnerCalls& runner)
    : registry_([&allocator](EmptyReason reason) { return allocator.empty_cache(reason); }),
      graph_(graph_bytes, runner) {
  const auto add = [this](ComponentSpec spec, Component& component) {
    const Status added = registry_.add(std::move(spec), component);
    KVFERRY_CHECK(added, "a component has one name");
  };
  if (weights != nullptr) {
    weights_.emplace(*weights);
    user_.emplace(*weights, registry_);
    add({kWeights, weights->strategy(), /*memory_intensive=*/true}, *weights_);
  }
  // Some hundred KiB, which the next pass takes again.
  add({kDecodeGraph, ComponentStrategy::kOffloaded, /*memory_intensive=*/false}, graph_);
}

ipc::Result<std::uint64_t> WorkerComponents::Graph::give_up(Deadline deadline) {
  // What else this worker is told waits behind it, and so does its end.
  const Deadline sooner = Deadline::at(std::min(deadline.when(), Deadline::after(kRests).when()));
  return runner_.run_when_graph_rests(
      [this](StepRunner& runner) {
        runner.release_graph();
        return bytes_.load();
      },
      sooner);
}

// The new weights are in use: that the old place of the tensors was not given up changes nothing
// about that.
Status WorkerComponents::UsedWeights::commit(Deadline deadline) {
  KVFERRY_TRY(store_.commit(deadline));
  if (store_.strategy() == ComponentStrategy::kResident) return ipc::ok();
  if (const auto released = registry_.release(kWeights, deadline); !released) {
    ipc::log_warn("weights stay on the device: {}", released.error().to_string());
  }
  return ipc::ok();
}

}  // namespace kvferry::worker
