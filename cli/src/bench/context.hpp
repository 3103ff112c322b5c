// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/bench.hpp"
#include "bench/bench_instance.hpp"
#include "bench/copier/copier_instance.hpp"
#include "bench/report.hpp"
#include "bench/shape.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "run/children.hpp"
#include "run/moving_line.hpp"
#include "run/run_dir.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace kvferry::cli {

/// What all benchmarks of a run share: its settings, its processes, and where figures go. What goes
/// wrong is thrown as Exception, an interruption too. @threading one thread.
class BenchContext {
 public:
  /// All outlive this.
  BenchContext(const BenchConfig& config, const RunDir& dir, ipc::SignalFd& signals);
  BenchContext(const BenchContext&) = delete;
  BenchContext& operator=(const BenchContext&) = delete;
  ~BenchContext();

  [[nodiscard]] const BenchConfig& config() const noexcept { return config_; }
  [[nodiscard]] const RunDir& dir() const noexcept { return dir_; }
  [[nodiscard]] bool cuda() const noexcept {
    return config_.devices.kind == ipc::DeviceKind::kCuda;
  }
  [[nodiscard]] bool wants(BenchKind kind) const noexcept;
  /// All ranks copy over one link.
  [[nodiscard]] bool has_one_device() const;

  /// Shows what is done now. Throws when the run was interrupted.
  void doing(const std::string& what);
  void check_interrupted();

  /// An instance for so many blocks on the device and so many bytes in host memory.
  [[nodiscard]] InstancePlan plan(const BenchShape& shape,
                                  std::uint32_t gpu_blocks,
                                  std::uint64_t host_bytes,
                                  cache_manager::CopyStrategy strategy);
  /// With another engine, on devices of its own: GPUs behind those of the first, as they go round.
  void add_engine(const BenchShape& shape, const std::string& name, InstancePlan& plan);
  /// Starts it, measures, ends it, and notes what it left.
  void with_instance(const BenchShape& shape,
                     const InstancePlan& plan,
                     const std::function<void(BenchInstance&)>& measure);
  /// The same as soon as jobs are accepted: the host pool is being filled.
  void with_young_instance(const BenchShape& shape,
                           const InstancePlan& plan,
                           const std::function<void(BenchInstance&)>& measure);
  /// The same for a worker of that plan that copies by itself.
  void with_copier(const BenchShape& shape,
                   const InstancePlan& plan,
                   OwnStrategy strategy,
                   const std::function<void(CopierInstance&)>& measure);
  /// Rank 0's device, opened in this process, where the bare calls are made.
  [[nodiscard]] std::unique_ptr<ipc::Device> bare_device(const BenchShape& shape,
                                                         const InstancePlan& plan);

  BenchReport report;

 private:
  void on_signal();
  [[nodiscard]] BenchTarget::Options target_options();
  void with_instance_of(const BenchShape& shape,
                        const InstancePlan& plan,
                        BenchTarget::Options options,
                        const std::function<void(BenchInstance&)>& measure);
  template <typename Target>
  void measure_on(Target& target,
                  const InstancePlan& plan,
                  const std::function<void(Target&)>& measure);

  const BenchConfig& config_;
  const RunDir& dir_;
  ipc::SignalFd& signals_;
  ipc::EventLoop loop_;
  MovingLine line_;
  std::optional<ipc::Error> interrupted_;
  BenchTarget* target_ = nullptr;  ///< While one runs.
  std::uint32_t devices_ = 0;      ///< Simulated ones that were named.
};

}  // namespace kvferry::cli
