// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "run/leak_check.hpp"
#include "run/run_dir.hpp"
#include "run/supervisor.hpp"

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvferry::cli {

/// What the processes of a run left behind, seen from outside after all of them had ended.
struct Leavings {
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
  std::vector<std::string> names;
  std::uint64_t restarts = 0;       ///< Of processes, during the run.
  std::optional<ipc::Error> error;  ///< The devices could not be looked at.
};

/// The processes of a run, from the first to the last: started, watched for what they hold, taken
/// down, and looked at for what they left.
/// @threading the loop's thread.
class RunProcesses {
 public:
  struct Hooks {
    std::function<void(const std::string& line)> say;    ///< For the terminal, at once.
    std::function<void(const ipc::Error&)> on_hopeless;  ///< As Supervisor's.
    std::function<void()> on_change;                     ///< A process started or died.
    /// One died that nobody asked to end. May be empty.
    std::function<void(const std::string& name)> on_death = {};
  };

  /// Throws Exception, as Supervisor. The directory outlives this.
  RunProcesses(ipc::EventLoop& loop,
               const RunDir& dir,
               std::string instance,
               std::filesystem::path log_dir,
               Hooks hooks);
  RunProcesses(const RunProcesses&) = delete;
  RunProcesses& operator=(const RunProcesses&) = delete;
  ~RunProcesses();

  [[nodiscard]] ipc::Status start(std::vector<ChildSpec> children);
  /// As Supervisor's.
  [[nodiscard]] ipc::Status kill(std::string_view name) { return supervisor_->kill(name); }
  /// As Supervisor's.
  [[nodiscard]] std::vector<std::pair<std::string, pid_t>> running() const {
    return supervisor_->running();
  }
  /// Notes what they hold, now and from now on: when they have found each other, and before their
  /// end.
  void observe();
  /// The user wants all to end: within five seconds, whatever goes on.
  void interrupt();
  [[nodiscard]] bool interrupted() const noexcept { return interrupted_at_.has_value(); }
  /// Every process that was started, the dead ones too.
  [[nodiscard]] const std::vector<pid_t>& started() const noexcept { return children_; }
  [[nodiscard]] std::uint64_t deaths() const noexcept { return supervisor_->deaths(); }
  /// Ends all and looks at what they left. host_bytes: of the manager's pool and of what else takes
  /// its time to be unmapped. failed: shows the ends of their logs, unless the reason has been
  /// told.
  [[nodiscard]] Leavings end(const DeviceProbe& devices, std::uint64_t host_bytes, bool failed);

 private:
  [[nodiscard]] ipc::Result<std::uint64_t> settled_device_bytes(const DeviceProbe& devices);

  ipc::EventLoop& loop_;
  const RunDir& dir_;
  const std::string instance_;
  Hooks hooks_;
  HostMemoryProbe host_probe_;
  std::vector<pid_t> children_;
  std::optional<Supervisor> supervisor_;  ///< Until end().
  std::optional<ipc::TimePoint> interrupted_at_;
  ipc::TimerId observe_timer_ = 0;
};

/// How long all processes of an instance may take until they work together. A busy machine takes
/// its time to start processes, and host memory is really allocated, and pinned for GPUs, before.
[[nodiscard]] ipc::Duration start_limit(ipc::Duration patience, std::uint64_t host_bytes);

}  // namespace kvferry::cli
