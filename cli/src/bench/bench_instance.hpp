// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/worker/client.hpp"
#include "run/children.hpp"
#include "run/leak_check.hpp"
#include "run/processes.hpp"
#include "run/run_dir.hpp"

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace kvferry::cli {

/// A whole instance for one measurement, with this process as its engine.
/// @threading the loop's thread.
class BenchInstance {
 public:
  struct Options {
    InstancePlan plan;
    ipc::Geometry geometry;
    std::filesystem::path log_dir;
    ipc::Duration patience{};  ///< For anything to go on.
    std::function<void(const std::string& line)> say;
  };

  /// Throws Exception, as RunProcesses. All outlive this.
  BenchInstance(ipc::EventLoop& loop, const RunDir& dir, Options options);
  BenchInstance(const BenchInstance&) = delete;
  BenchInstance& operator=(const BenchInstance&) = delete;
  ~BenchInstance();

  /// Returns when jobs are accepted.
  [[nodiscard]] ipc::Status start();
  [[nodiscard]] worker::Client& client() noexcept { return *client_; }
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
  /// Processor time of all processes of the instance so far, and of this one, in seconds.
  [[nodiscard]] double cpu_seconds() const;
  /// Ends all. @pre nothing is used any more that came from client().
  [[nodiscard]] Leavings end(const DeviceProbe& devices, bool failed);

 private:
  [[nodiscard]] bool try_connect();

  ipc::EventLoop& loop_;
  const RunDir& dir_;
  const Options options_;
  ipc::Deadline patience_ = ipc::Deadline::after({});
  std::optional<ipc::Error> over_;  ///< The run is, for this reason.
  std::optional<RunProcesses> processes_;
  std::unique_ptr<worker::Client> client_;
};

}  // namespace kvferry::cli
