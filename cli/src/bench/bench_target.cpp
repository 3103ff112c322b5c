// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_target.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <ctime>
#include <utility>

namespace kvferry::cli {
namespace {

/// Of all threads of a process; 0 when it has ended.
double cpu_seconds_of(pid_t pid) {
  clockid_t clock = 0;
  timespec spent{};
  if (::clock_getcpuclockid(pid, &clock) != 0 || ::clock_gettime(clock, &spent) != 0) return 0;
  return static_cast<double>(spent.tv_sec) + static_cast<double>(spent.tv_nsec) / 1e9;
}

}  // namespace

BenchTarget::BenchTarget(ipc::EventLoop& loop, const RunDir& dir, Options options)
    : loop_(loop), dir_(dir), options_(std::move(options)) {
  RunProcesses::Hooks hooks;
  hooks.say = options_.say;
  hooks.on_hopeless = [this](const ipc::Error& error) { over_ = error; };
  hooks.on_change = [] {};
  processes_.emplace(loop_, dir_, options_.instance, options_.log_dir, std::move(hooks));
}

void BenchTarget::interrupt(const ipc::Error& why) {
  over_ = why;
  if (processes_) processes_->interrupt();
}

ipc::Status BenchTarget::run_until(const std::function<bool()>& done, std::string_view what) {
  note_progress();
  while (!done()) {
    if (over_) return *over_;
    if (patience_.expired()) {
      return KVFERRY_ERROR(kTimeout, "{} did not go on for {:.1f} s", what,
                           std::chrono::duration<double>(options_.patience).count());
    }
    loop_.run_once(patience_);
  }
  return ipc::ok();
}

ipc::Status BenchTarget::run_for(ipc::Deadline until) {
  while (!until.expired()) {
    if (over_) return *over_;
    loop_.run_once(until);
  }
  return ipc::ok();
}

double BenchTarget::cpu_seconds() const {
  double seconds = cpu_seconds_of(::getpid());
  for (const pid_t pid : processes_->started()) seconds += cpu_seconds_of(pid);
  return seconds;
}

std::map<std::string, double> BenchTarget::cpu_seconds_each() const {
  std::map<std::string, double> seconds;
  for (const auto& [name, pid] : processes_->running()) seconds[name] = cpu_seconds_of(pid);
  return seconds;
}

Leavings BenchTarget::end_processes(const DeviceProbe& devices, bool failed) {
  processes_->observe();
  return processes_->end(devices, options_.host_bytes, failed);
}

}  // namespace kvferry::cli
