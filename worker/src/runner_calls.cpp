// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "runner_calls.hpp"

#include "step_runner.hpp"

#include <atomic>
#include <future>
#include <memory>
#include <utility>

namespace kvferry::worker {

using ipc::Deadline;
using ipc::Result;

Result<std::uint64_t> RunnerCalls::run(const Call& call, Deadline deadline) const {
  return run_at(Moment::kNext, call, deadline);
}

Result<std::uint64_t> RunnerCalls::run_when_graph_rests(const Call& call, Deadline deadline) const {
  return run_at(Moment::kGraphRests, call, deadline);
}

Result<std::uint64_t> RunnerCalls::run_at(Moment moment,
                                          const Call& call,
                                          Deadline deadline) const {
  // A call that its caller no longer waits for has not run and never will.
  const auto taken = std::make_shared<std::atomic<bool>>(false);
  auto promise = std::make_shared<std::promise<Result<std::uint64_t>>>();
  // wait-none: below
  std::future<Result<std::uint64_t>> done = promise->get_future();
  // The promise is the call's alone, so that it breaks when the call is dropped.
  post_([promise = std::move(promise), taken, call, moment](StepRunner& runner) {
    const auto take = [promise, taken, call, &runner] {
      if (!taken->exchange(true)) promise->set_value(call(runner));
    };
    if (moment == Moment::kNext) {
      take();
    } else {
      runner.when_graph_rests(take);
    }
  });
  // wait: the runner's thread to take the call, which it does between two steps; deadline, the
  // caller's; its end breaks the promise
  const bool in_time = done.wait_for(deadline.remaining()) == std::future_status::ready;
  if (!in_time && !taken->exchange(true)) {
    return KVFERRY_ERROR(kTimeout, "the worker's step loop did not take it by the deadline");
  }
  try {
    return done.get();
  } catch (const std::future_error&) {
    return KVFERRY_ERROR(kCancelled, "the worker's step loop has ended");
  }
}

}  // namespace kvferry::worker
