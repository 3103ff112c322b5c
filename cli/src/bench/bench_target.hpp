// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/worker/client.hpp"
#include "run/leak_check.hpp"
#include "run/processes.hpp"
#include "run/run_dir.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// Processes that copy blocks for a measurement, with this process as their engine.
/// @threading the loop's thread.
class BenchTarget {
 public:
  struct Options {
    std::string instance;
    std::filesystem::path log_dir;
    std::uint64_t host_bytes = 0;  ///< Of the host memory that they share.
    ipc::Duration patience{};      ///< For anything to go on.
    bool whole_pool = true;        ///< Started only when all of the host pool is there.
    std::function<void(const std::string& line)> say;
  };
  struct Ended {
    std::uint64_t job = 0;
    std::uint64_t bytes = 0;
    std::optional<ipc::Error> error;
  };

  BenchTarget(const BenchTarget&) = delete;
  BenchTarget& operator=(const BenchTarget&) = delete;
  virtual ~BenchTarget() = default;

  /// A job of one way. To the device goes what was copied to the host under the same handle.
  [[nodiscard]] virtual ipc::Result<std::uint64_t> submit(
      std::uint64_t handle, const std::vector<worker::SequenceItem>& blocks, bool to_host) = 0;
  /// Jobs that have ended since the last call.
  virtual void take(const std::function<void(const Ended&)>& each) = 0;
  /// Forgets what was copied to the host under a handle.
  [[nodiscard]] virtual ipc::Status drop(std::uint64_t handle) = 0;
  /// False while jobs would be refused: after the death of what copies.
  [[nodiscard]] virtual bool accepts() = 0;
  /// Kills the process that copies; another one takes its place.
  [[nodiscard]] virtual ipc::Status kill_copier() = 0;

  /// Until done(), which is asked whenever something came. kTimeout when for Options::patience no
  /// progress was noted; why the run is over when it is; the interruption.
  [[nodiscard]] ipc::Status run_until(const std::function<bool()>& done, std::string_view what);
  /// Nothing but what comes by itself, until then.
  [[nodiscard]] ipc::Status run_for(ipc::Deadline until);
  /// Looks for what comes instead of sleeping, as an engine does that needs a block now.
  void stay_awake(ipc::Duration time) noexcept { loop_.stay_awake(time); }
  void note_progress() { patience_ = ipc::Deadline::after(options_.patience); }
  /// A signal came: what runs ends, and start() and run_until() return this.
  void interrupt(const ipc::Error& why);
  /// Processor time of all processes so far, and of this one, in seconds.
  [[nodiscard]] double cpu_seconds() const;
  /// Of each process that runs, by its name.
  [[nodiscard]] std::map<std::string, double> cpu_seconds_each() const;
  /// Of processes that nobody asked to end.
  [[nodiscard]] std::uint64_t deaths() const noexcept { return processes_->deaths(); }

 protected:
  /// Throws Exception, as RunProcesses. All outlive this.
  BenchTarget(ipc::EventLoop& loop, const RunDir& dir, Options options);

  [[nodiscard]] ipc::Status kill(std::string_view child) { return processes_->kill(child); }
  /// Ends the processes. @pre nothing of theirs is held here any more.
  [[nodiscard]] Leavings end_processes(const DeviceProbe& devices, bool failed);

  // NOLINTBEGIN(cppcoreguidelines-non-private-member-variables-in-classes): for the two that derive
  ipc::EventLoop& loop_;
  const RunDir& dir_;
  const Options options_;
  std::optional<ipc::Error> over_;  ///< The run is, for this reason.
  std::optional<RunProcesses> processes_;
  // NOLINTEND(cppcoreguidelines-non-private-member-variables-in-classes)

 private:
  ipc::Deadline patience_ = ipc::Deadline::after({});
};

}  // namespace kvferry::cli
