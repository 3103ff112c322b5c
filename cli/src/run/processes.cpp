// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run/processes.hpp"

#include "print.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kStopGrace = 3s;
/// Unmapping host memory in small pages takes a mover about 60 ms per GiB, freeing it the last one
/// about 50 ms more (docs/performance.md).
constexpr ipc::Duration kStopPerGib = 200ms;
constexpr ipc::Duration kDeviceSettle = 5s;
constexpr ipc::Duration kLookAgain = 50ms;
/// From the first signal: all of it within five seconds, whatever was going on.
constexpr ipc::Duration kInterruptedGrace = 3s;
constexpr ipc::Duration kInterruptedSettle = 4s;
constexpr ipc::Duration kObservePeriod = 1s;
constexpr ipc::Duration kLeastStartLimit = 60s;
constexpr ipc::Duration kStartPerGib = 1s;
constexpr std::size_t kLogTail = 10;

int whole_gib(std::uint64_t size_bytes) { return static_cast<int>(size_bytes >> 30U); }

}  // namespace

RunProcesses::RunProcesses(ipc::EventLoop& loop,
                           const RunDir& dir,
                           std::string instance,
                           std::filesystem::path log_dir,
                           Hooks hooks)
    : loop_(loop), dir_(dir), instance_(std::move(instance)), hooks_(std::move(hooks)) {
  Supervisor::Hooks supervised;
  supervised.say = hooks_.say;
  supervised.on_hopeless = hooks_.on_hopeless;
  supervised.on_started = [this](pid_t pid) {
    children_.push_back(pid);
    hooks_.on_change();
  };
  supervised.on_death = [this](const std::string& name) {
    hooks_.on_change();
    if (hooks_.on_death) hooks_.on_death(name);
    observe();
  };
  supervisor_.emplace(loop_, std::move(log_dir), std::move(supervised));
}

RunProcesses::~RunProcesses() { loop_.cancel(observe_timer_); }

ipc::Status RunProcesses::start(std::vector<ChildSpec> children) {
  for (ChildSpec& child : children) KVFERRY_TRY(supervisor_->start(std::move(child)));
  return ipc::ok();
}

void RunProcesses::observe() {
  loop_.cancel(observe_timer_);
  for (const pid_t pid : children_) host_probe_.observe(pid);
  observe_timer_ = loop_.after(kObservePeriod, [this] { observe(); });
}

void RunProcesses::interrupt() {
  if (!interrupted_at_) interrupted_at_ = ipc::MonotonicClock::now();
  if (supervisor_) supervisor_->hurry(ipc::Deadline::at(*interrupted_at_ + kInterruptedGrace));
}

ipc::Result<std::uint64_t> RunProcesses::settled_device_bytes(const DeviceProbe& devices) {
  const ipc::Deadline deadline = ipc::Deadline::after(kDeviceSettle);
  while (true) {
    KVFERRY_ASSIGN(const std::uint64_t taken, devices.taken_bytes());
    const bool in_a_hurry =
        interrupted_at_ && ipc::MonotonicClock::now() > *interrupted_at_ + kInterruptedSettle;
    if (taken == 0 || in_a_hurry || deadline.expired()) return taken;
    loop_.run_once(ipc::Deadline::after(kLookAgain).earlier(deadline));
  }
}

Leavings RunProcesses::end(const DeviceProbe& devices, std::uint64_t host_bytes, bool failed) {
  loop_.cancel(observe_timer_);
  supervisor_->stop(kStopGrace + kStopPerGib * whole_gib(host_bytes));
  if (failed && !interrupted_at_ && !supervisor_->hopeless()) {
    (void)write_err(supervisor_->logs(kLogTail));
  }
  Leavings left;
  left.restarts = supervisor_->restarts();
  if (supervisor_->ended_unreplaced()) dir_.remove_stale_names(instance_);
  supervisor_.reset();
  if (const auto taken = settled_device_bytes(devices); taken) {
    left.device_bytes = *taken;
  } else {
    left.error = taken.error();
  }
  left.host_bytes = host_probe_.leaked_bytes();
  left.names = dir_.leftovers(instance_);
  return left;
}

ipc::Duration start_limit(ipc::Duration patience, std::uint64_t host_bytes) {
  return std::max(patience, kLeastStartLimit) + kStartPerGib * whole_gib(host_bytes);
}

}  // namespace kvferry::cli
