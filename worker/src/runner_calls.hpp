// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <cstdint>
#include <functional>
#include <utility>

namespace kvferry::worker {

class StepRunner;

/// Calls of other threads into the runner's, which waits for nothing meanwhile but them.
/// @threading any but the runner's.
class RunnerCalls {
 public:
  /// Runs a call on the runner's thread, or drops it when the runner is gone.
  using Post = std::function<void(std::function<void(StepRunner&)>)>;
  using Call = std::function<ipc::Result<std::uint64_t>(StepRunner&)>;

  explicit RunnerCalls(Post post) : post_(std::move(post)) {}

  /// Between two of its callbacks. kTimeout: it has not run by the deadline, and never will;
  /// kCancelled: the runner has ended.
  [[nodiscard]] ipc::Result<std::uint64_t> run(const Call& call, ipc::Deadline deadline) const;
  /// The same, when no launch of the decode graph is under way.
  [[nodiscard]] ipc::Result<std::uint64_t> run_when_graph_rests(const Call& call,
                                                                ipc::Deadline deadline) const;

 private:
  enum class Moment : bool { kNext, kGraphRests };
  [[nodiscard]] ipc::Result<std::uint64_t> run_at(Moment moment,
                                                  const Call& call,
                                                  ipc::Deadline deadline) const;

  const Post post_;
};

}  // namespace kvferry::worker
