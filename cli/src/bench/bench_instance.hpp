// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/bench_target.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/worker/client.hpp"
#include "run/children.hpp"
#include "run/leak_check.hpp"
#include "run/run_dir.hpp"

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// A whole instance for one measurement, with this process as its engine: the movers copy.
/// @threading the loop's thread.
class BenchInstance final : public BenchTarget {
 public:
  /// Throws Exception, as RunProcesses. All outlive this. options: of the plan are taken from it.
  BenchInstance(ipc::EventLoop& loop,
                const RunDir& dir,
                InstancePlan plan,
                ipc::Geometry geometry,
                Options options);
  BenchInstance(const BenchInstance&) = delete;
  BenchInstance& operator=(const BenchInstance&) = delete;
  ~BenchInstance() override;

  /// Returns when jobs are accepted.
  [[nodiscard]] ipc::Status start();
  [[nodiscard]] worker::Client& client() noexcept { return *client_; }
  /// A client of another engine of the plan, which finds the same blocks, once its jobs are
  /// accepted. Throws Exception. Its descriptor is the caller's to watch.
  [[nodiscard]] std::unique_ptr<worker::Client> connect(const std::string& engine);
  /// Right before its manager was.
  [[nodiscard]] ipc::TimePoint started_at() const noexcept { return started_at_; }

  [[nodiscard]] ipc::Result<std::uint64_t> submit(std::uint64_t handle,
                                                  const std::vector<worker::SequenceItem>& blocks,
                                                  bool to_host) override;
  void take(const std::function<void(const Ended&)>& each) override;
  [[nodiscard]] ipc::Status drop(std::uint64_t handle) override;
  [[nodiscard]] bool accepts() override { return client_->state().offload_ready; }
  /// Of rank 0.
  [[nodiscard]] ipc::Status kill_copier() override { return kill("mover/0"); }
  [[nodiscard]] ipc::Status kill_manager() { return kill("manager"); }
  /// Nothing between its death and its successor's start.
  [[nodiscard]] std::optional<pid_t> pid_of(std::string_view child) const;
  [[nodiscard]] ipc::EventLoop& loop() noexcept { return loop_; }

  /// Ends all. @pre nothing is used any more that came from client().
  [[nodiscard]] Leavings end(const DeviceProbe& devices, bool failed);

 private:
  [[nodiscard]] worker::ClientOptions options_of(const std::string& engine) const;
  [[nodiscard]] bool try_connect();
  [[nodiscard]] ipc::Status wait_for_pool(ipc::Deadline deadline);

  const InstancePlan plan_;
  const ipc::Geometry geometry_;
  const ipc::Digest weights_ = ipc::Digest::random();
  std::unique_ptr<worker::Client> client_;
  ipc::TimePoint started_at_;
};

}  // namespace kvferry::cli
