// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/calibration.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/model/geometry.hpp"
#include "kvferry/ipc/os/cache_file.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "mover/strategy_chooser.hpp"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

namespace kvferry::cache_manager {

/// Finds the calibration of a mover's device and geometry: what is kept on disk, else measured in
/// the background, in moments without jobs. Serving never waits for it: until it is there, choosers
/// use their rule of thumb, and a job that comes during a step shares the link with it for a few
/// milliseconds. It holds memory of the device only while an arena is mapped, so that what a clear
/// finds free is not ours, and a clear waits for a step and for no more than that.
/// @threading any.
class Calibrator {
 public:
  struct Options {
    ipc::Geometry geometry;
    std::filesystem::path cache_dir;  ///< Empty: nothing is kept.
    /// Then it is given up: it has memory of the device, and the machine's turn, which others wait
    /// for. Steps are a few milliseconds each, and end before, but for jobs in between.
    ipc::Duration measured_within = std::chrono::seconds(10);
    ipc::Duration first_retry = std::chrono::seconds(30);  ///< Doubles with each.
  };
  /// quiet: no job is queued or runs. jobs: how many have come so far.
  Calibrator(ipc::Device& device,
             Options options,
             std::function<bool()> quiet,
             std::function<std::uint64_t()> jobs);
  Calibrator(const Calibrator&) = delete;
  Calibrator& operator=(const Calibrator&) = delete;
  ~Calibrator();

  /// Gives the chooser the calibration for such an arena, now or later, unless it is stopped
  /// before.
  void start(std::shared_ptr<StrategyChooser> chooser, ipc::ArenaOrder order);
  /// Ends what start() began, from its next step on. Ok: nothing of the device is held any more.
  /// kTimeout.
  [[nodiscard]] ipc::Status stop(ipc::Deadline deadline);

 private:
  struct Task {
    std::shared_ptr<StrategyChooser> chooser;
    ipc::ArenaOrder order = ipc::ArenaOrder::kLayerFirst;
  };

  void run();
  void calibrate(const Task& task);
  [[nodiscard]] ipc::Result<Calibration> find(ipc::ArenaOrder order);
  [[nodiscard]] ipc::Result<Calibration> measure(ipc::ArenaOrder order);
  /// Until there is a task whose turn it is, or the end.
  void wait_task(std::unique_lock<std::mutex>& lock);
  void look_for_kept(const Task& task);
  void adopt(const Task& task, Calibration found);
  [[nodiscard]] ipc::Result<Calibration> measure_with(ipc::ArenaOrder order,
                                                      CalibrationSteps& steps);
  /// The device or its link had no quiet moment.
  void try_later(const Task& task, const ipc::Error& error);
  /// The right to measure: movers of one machine that do it at the same time would measure each
  /// other. Nothing: nobody can tell. kCancelled; kBusy: others have it for too long.
  [[nodiscard]] ipc::Result<std::optional<ipc::CacheLock>> wait_turn();
  /// Until no job is there. False: stopped, or not by then.
  [[nodiscard]] bool wait_quiet(std::optional<ipc::Deadline> limit);
  [[nodiscard]] bool stopped();
  [[nodiscard]] bool is_stopped() const { return ending_ || stops_ != stops_before_; }  ///< Locked.
  [[nodiscard]] bool take_device();
  void give_device_back();
  /// As what runs, unless it was stopped or there is another one.
  void keep(const Task& task);

  ipc::Device& device_;
  const Options options_;
  const std::function<bool()> quiet_;
  const std::function<std::uint64_t()> jobs_;
  std::shared_ptr<const Calibration> found_;  ///< Its thread's, as retry_: for the next epochs.
  ipc::Duration retry_{};                     ///< After the last try without a result.

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::optional<Task> task_;
  bool is_new_ = false;        ///< task_ is of start(), not of try_later().
  ipc::TimePoint next_try_{};  ///< To measure.
  std::uint64_t stops_ = 0;
  std::uint64_t stops_before_ = 0;  ///< What runs was begun: at another number it should end.
  bool has_device_ = false;         ///< Memory of it, or work on it.
  bool ending_ = false;
  std::optional<ipc::OwnThread> thread_;  // last: starts when all above exists
};

}  // namespace kvferry::cache_manager
