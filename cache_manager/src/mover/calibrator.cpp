// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/calibrator.hpp"

#include "kvferry/cache_manager/calibration_file.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using ipc::ErrorCode;
using ipc::Result;
using ipc::Status;
using std::chrono_literals::operator""min;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

/// How often it is looked whether jobs run still, while they do.
constexpr ipc::Duration kFirstLook = 5ms;
constexpr ipc::Duration kLongestLook = 500ms;
/// Until the processes that measure now have done so.
constexpr ipc::Duration kTurnLook = 20ms;
constexpr ipc::Duration kTurnPatience = 60s;
constexpr std::uint64_t kSimulatedBytes = 1ULL << 30;
constexpr ipc::Duration kLastRetry = 30min;

void log_choices(const Calibration& calibration, const StrategyChooser& chooser) {
  for (const auto direction :
       {ipc::CopyDirection::kDeviceToHost, ipc::CopyDirection::kHostToDevice}) {
    JobShape alone{direction, {}, true, chooser.slots(), false, chooser.rule()};
    JobShape among = alone;
    among.alone = false;
    ipc::log_info("copy strategy to {}: {}; beside other jobs: {}",
                  direction == ipc::CopyDirection::kDeviceToHost ? "host" : "device",
                  describe_choices(calibration, chooser.possible(), alone, HandOverCost{}),
                  describe_choices(calibration, chooser.possible(), among, HandOverCost{}));
  }
}

std::int64_t seconds_of(ipc::Duration duration) {
  return std::chrono::duration_cast<std::chrono::seconds>(duration).count();
}

ipc::Error stopped_error() { return KVFERRY_ERROR(kCancelled, "the measurement was stopped"); }

}  // namespace

Calibrator::Calibrator(ipc::Device& device,
                       Options options,
                       std::function<bool()> quiet,
                       std::function<std::uint64_t()> jobs)
    : device_(device),
      options_(std::move(options)),
      quiet_(std::move(quiet)),
      jobs_(std::move(jobs)) {
  thread_.emplace("kvf-calibrate", ipc::OwnThread::Runs::kOurCode, [this] { run(); });
}

Calibrator::~Calibrator() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  // wait-brief: its own thread, which was told to stop: at most a step; limit
  // OwnThread::kEndsWithin
  thread_->wait_end();
}

void Calibrator::start(std::shared_ptr<StrategyChooser> chooser, ipc::ArenaOrder order) {
  {
    const std::lock_guard lock(mutex_);
    task_ = Task{std::move(chooser), order};
    is_new_ = true;
  }
  changed_.notify_all();
}

Status Calibrator::stop(ipc::Deadline deadline) {
  std::unique_lock lock(mutex_);
  task_.reset();
  ++stops_;
  changed_.notify_all();
  // wait: a timed step of the calibration; deadline, of the caller; nothing
  if (changed_.wait_until(lock, deadline.when(), [this] { return !has_device_; })) {
    return ipc::ok();
  }
  return KVFERRY_ERROR(kTimeout, "a measurement of copies did not end in time");
}

bool Calibrator::stopped() {
  const std::lock_guard lock(mutex_);
  return is_stopped();
}

bool Calibrator::take_device() {
  const std::lock_guard lock(mutex_);
  has_device_ = !is_stopped();
  return has_device_;
}

void Calibrator::give_device_back() {
  {
    const std::lock_guard lock(mutex_);
    has_device_ = false;
  }
  changed_.notify_all();
}

void Calibrator::keep(const Task& task) {
  const std::lock_guard lock(mutex_);
  if (!is_stopped() && !task_) task_ = task;
}

void Calibrator::run() {
  while (true) {
    std::optional<Task> task;
    bool is_due = true;
    {
      std::unique_lock lock(mutex_);
      wait_task(lock);
      if (ending_) return;
      task = std::exchange(task_, std::nullopt);
      is_new_ = false;
      is_due = ipc::MonotonicClock::now() >= next_try_;
      stops_before_ = stops_;
    }
    if (is_due || found_) {
      calibrate(*task);
    } else {
      look_for_kept(*task);
    }
  }
}

void Calibrator::wait_task(std::unique_lock<std::mutex>& lock) {
  while (!ending_ && !(task_ && (is_new_ || ipc::MonotonicClock::now() >= next_try_))) {
    if (task_) {
      // wait: the next try after one without a result; next_try_, at most kLastRetry = 30 min;
      // start(), stop() or the end
      changed_.wait_until(lock, next_try_);
    } else {
      // wait-idle: an arena to calibrate for; start() or the end; thread kvf-calibrate
      changed_.wait(lock, [this] { return ending_ || task_; });
    }
  }
}

bool Calibrator::wait_quiet(std::optional<ipc::Deadline> limit) {
  std::unique_lock lock(mutex_);
  ipc::Duration look = kFirstLook;
  while (!is_stopped() && !(limit && limit->expired())) {
    lock.unlock();
    const bool quiet = quiet_();
    lock.lock();
    if (quiet) return !is_stopped();
    // wait: a moment without jobs; look, at most kLongestLook = 500 ms, again and again; stop()
    changed_.wait_for(lock, look, [this] { return is_stopped(); });
    look = std::min(2 * look, kLongestLook);
  }
  return false;
}

Result<std::optional<ipc::CacheLock>> Calibrator::wait_turn() {
  const ipc::Deadline deadline = ipc::Deadline::after(kTurnPatience);
  std::unique_lock lock(mutex_);
  while (!is_stopped() && !deadline.expired()) {
    lock.unlock();
    auto turn = ipc::CacheLock::try_take(options_.cache_dir);
    lock.lock();
    if (!turn) return std::optional<ipc::CacheLock>();  // saving says why
    if (*turn) return std::optional(std::move(*turn));
    // wait: another process that measures; kTurnLook, together kTurnPatience = 60 s; stop()
    changed_.wait_for(lock, kTurnLook, [this] { return is_stopped(); });
  }
  if (is_stopped()) return stopped_error();
  return KVFERRY_ERROR(kBusy, "other movers of this machine measure, for {} s and more",
                       seconds_of(kTurnPatience));
}

void Calibrator::calibrate(const Task& task) {
  if (!found_ || found_->key.order != task.order) {
    auto found = find(task.order);
    if (!found) {
      if (found.error().code == ErrorCode::kCancelled) return;
      if (found.error().code == ErrorCode::kBusy) return try_later(task, found.error());
      ipc::log_warn("copies not calibrated, strategies are chosen by the size of chunks: {}",
                    found.error().to_string());
      return;
    }
    return adopt(task, std::move(found).value());
  }
  log_choices(*found_, *task.chooser);
  task.chooser->adopt(found_);
}

void Calibrator::try_later(const Task& task, const ipc::Error& error) {
  retry_ =
      retry_ == ipc::Duration::zero() ? options_.first_retry : std::min(2 * retry_, kLastRetry);
  ipc::log_info(
      "copies not calibrated yet, strategies are chosen by the size of chunks; again in {} s: {}",
      seconds_of(retry_), error.to_string());
  {
    const std::lock_guard lock(mutex_);
    next_try_ = ipc::MonotonicClock::now() + retry_;
  }
  keep(task);
}

// Between tries: another mover may have measured meanwhile.
void Calibrator::look_for_kept(const Task& task) {
  const auto key = calibration_key(device_, options_.geometry, task.order);
  if (key && !options_.cache_dir.empty()) {
    if (auto kept = load_calibration(calibration_file(options_.cache_dir, *key), *key)) {
      return adopt(task, std::move(kept).value());
    }
  }
  keep(task);
}

void Calibrator::adopt(const Task& task, Calibration found) {
  found_ = std::make_shared<const Calibration>(std::move(found));
  retry_ = ipc::Duration::zero();
  log_choices(*found_, *task.chooser);
  task.chooser->adopt(found_);
}

Result<Calibration> Calibrator::find(ipc::ArenaOrder order) {
  KVFERRY_ASSIGN(const CalibrationKey key, calibration_key(device_, options_.geometry, order));
  if (options_.cache_dir.empty()) return measure(order);
  const std::filesystem::path file = calibration_file(options_.cache_dir, key);
  auto kept = load_calibration(file, key);
  if (kept) {
    ipc::log_info("copies of {} were calibrated before: {}", key.device.name, file.native());
    return kept;
  }
  const ErrorCode code = kept.error().code;
  if (code == ErrorCode::kStaleEpoch || code == ErrorCode::kVersionMismatch) {
    ipc::log_info("calibrating anew: {}", kept.error().message);
  } else if (code != ErrorCode::kNotFound) {
    ipc::log_warn("calibrating anew, what is kept cannot be used: {}", kept.error().to_string());
  }
  if (!wait_quiet(std::nullopt)) return stopped_error();
  KVFERRY_ASSIGN(const std::optional<ipc::CacheLock> turn, wait_turn());
  // Another mover of this device may have had the turn before.
  if (kept = load_calibration(file, key); kept) return kept;
  KVFERRY_ASSIGN(Calibration measured, measure(order));
  if (const Status saved = save_calibration(file, measured); saved) {
    ipc::log_info("copies of {} calibrated: {}", key.device.name, file.native());
  } else {
    ipc::log_warn("the calibration is not kept: {}", saved.error().to_string());
  }
  return measured;
}

Result<Calibration> Calibrator::measure(ipc::ArenaOrder order) {
  std::uint64_t before = 0;
  const ipc::Deadline limit = ipc::Deadline::after(options_.measured_within);
  CalibrationSteps steps;
  steps.begin = [this, &before, limit] {
    if (!wait_quiet(limit)) return false;
    before = jobs_();
    return true;
  };
  steps.take_device = [this] { return take_device(); };
  steps.gave_device_back = [this] { give_device_back(); };
  steps.counts = [this, &before] { return jobs_() == before && quiet_(); };
  auto measured = measure_with(order, steps);
  if (!measured && measured.error().code == ErrorCode::kCancelled && !stopped()) {
    return KVFERRY_ERROR(kBusy, "{} was not without jobs for long enough within {} s",
                         device_.spec().to_string(), seconds_of(options_.measured_within));
  }
  return measured;
}

Result<Calibration> Calibrator::measure_with(ipc::ArenaOrder order, CalibrationSteps& steps) {
  if (device_.spec().kind != ipc::DeviceKind::kHost) {
    steps.most_spread = kMostCalibrationSpread;
    return measure_calibration(device_, options_.geometry, order, steps);
  }
  // A simulated device has exactly the memory that its arena needs: another one is measured.
  ipc::DeviceSpec spec = device_.spec();
  spec.host_name = fmt::format("calibration-{}", ::getpid());
  spec.host_capacity_bytes = kSimulatedBytes;
  try {
    const std::unique_ptr<ipc::Device> device = ipc::open_device(spec);
    return measure_calibration(*device, options_.geometry, order, steps);
  } catch (const ipc::Exception& error) {
    return error.error();
  }
}

}  // namespace kvferry::cache_manager
