// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "operator_calls.hpp"
#include "replay/samples.hpp"

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cli {

/// Takes the samples of a replay. It waits for nobody: the manager is asked beside all else, and
/// what it has not answered when a sample is due leaves that one out.
/// @threading the loop's thread.
class Sampler {
 public:
  struct Hooks {
    /// Name and process of each child that runs.
    std::function<std::vector<std::pair<std::string, pid_t>>()> processes;
    /// Somebody answers who is asked: nothing is spent on a manager that is away.
    std::function<bool()> manager_there;
    std::function<std::uint64_t()> requests_done;
  };

  Sampler(ipc::EventLoop& loop, std::string runtime_dir, std::string instance, Hooks hooks);
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;
  ~Sampler() { *alive_ = false; }

  /// The first request is taken next.
  void start();
  /// To be called whenever a request is done, also in the middle of a step's end.
  void on_request_done(std::uint64_t requests);
  /// The last one. Runs the loop until it is complete, or the deadline.
  void finish(ipc::Deadline deadline);
  [[nodiscard]] const std::vector<RunSample>& samples() const noexcept { return list_.samples(); }

 private:
  void take();
  void on_status(const ipc::Result<ipc::Envelope>& answer);

  ipc::EventLoop& loop_;
  const Hooks hooks_;
  SampleList list_;
  OperatorCalls calls_;
  ipc::TimePoint started_at_{};
  bool posted_ = false;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace kvferry::cli
