// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/bench_instance.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/worker/client.hpp"
#include "kvferry/worker/step_channel.hpp"

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <string>

namespace kvferry::cli {

/// Steps on all workers of one engine. @threading the instance's loop. @lifetime the instance and
/// the client outlive it.
class BenchSteps {
 public:
  /// Waits for the workers. Throws Exception.
  BenchSteps(BenchInstance& instance,
             worker::Client& client,
             const ipc::RuntimeDir& dir,
             const std::string& engine,
             std::uint32_t ranks);

  /// Throws Exception where it cannot be sent. session and epoch are each rank's.
  void send(ipc::Step step);
  [[nodiscard]] bool is_done() const noexcept { return running_ == 0 || failed_.has_value(); }
  /// A step failed, or what it verified held other bytes.
  [[nodiscard]] const std::optional<ipc::Error>& failed() const noexcept { return failed_; }

 private:
  BenchInstance& instance_;
  worker::Client& client_;
  std::list<worker::StepChannel> channels_;
  std::size_t running_ = 0;
  std::optional<ipc::Error> failed_;
};

}  // namespace kvferry::cli
