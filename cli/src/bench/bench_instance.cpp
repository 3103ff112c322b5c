// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_instance.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <ctime>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;

constexpr ipc::Duration kConnectTry = 200ms;
constexpr ipc::Duration kConnectRetry = 20ms;

/// Of all threads of a process; 0 when it has ended.
double cpu_seconds_of(pid_t pid) {
  clockid_t clock = 0;
  timespec spent{};
  if (::clock_getcpuclockid(pid, &clock) != 0 || ::clock_gettime(clock, &spent) != 0) return 0;
  return static_cast<double>(spent.tv_sec) + static_cast<double>(spent.tv_nsec) / 1e9;
}

}  // namespace

BenchInstance::BenchInstance(ipc::EventLoop& loop, const RunDir& dir, Options options)
    : loop_(loop), dir_(dir), options_(std::move(options)) {
  RunProcesses::Hooks hooks;
  hooks.say = options_.say;
  hooks.on_hopeless = [this](const ipc::Error& error) { over_ = error; };
  hooks.on_change = [] {};
  processes_.emplace(loop_, dir_, options_.plan.instance, options_.log_dir, std::move(hooks));
}

BenchInstance::~BenchInstance() {
  if (client_ != nullptr) loop_.unwatch(client_->fd());
}

void BenchInstance::interrupt(const ipc::Error& why) {
  over_ = why;
  if (processes_) processes_->interrupt();
}

bool BenchInstance::try_connect() {
  worker::ClientOptions options;
  options.runtime_dir = dir_.path().string();
  options.instance = options_.plan.instance;
  options.engine = options_.plan.engine;
  options.ranks = options_.geometry.ranks;
  options.identity.model = options_.geometry.name;
  options.identity.fingerprint = options_.geometry.fingerprint(options_.plan.arena.order);
  options.identity.weights = ipc::Digest::random();
  auto client = worker::Client::connect(options, ipc::Deadline::after(kConnectTry));
  if (client) {
    client_ = std::move(*client);
    return true;
  }
  const ipc::ErrorCode code = client.error().code;
  if (code != ipc::ErrorCode::kNoManager && code != ipc::ErrorCode::kTimeout &&
      code != ipc::ErrorCode::kPeerDied && code != ipc::ErrorCode::kNotFound) {
    over_ = client.error();
  }
  return false;
}

ipc::Status BenchInstance::start() {
  KVFERRY_TRY(processes_->start(instance_children(options_.plan, dir_.path())));
  processes_->observe();
  const ipc::Deadline deadline =
      ipc::Deadline::after(start_limit(options_.patience, options_.plan.host_bytes));
  while (!try_connect()) {
    if (over_) return *over_;
    if (deadline.expired()) return KVFERRY_ERROR(kTimeout, "no manager took this engine in time");
    loop_.run_once(ipc::Deadline::after(kConnectRetry).earlier(deadline));
  }
  loop_.watch(client_->fd(), [] {});  // it ends a round of the loop
  const auto ready = [this] {
    (void)client_->poll(1);
    return client_->state().offload_ready;
  };
  while (!ready()) {
    if (over_) return *over_;
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout,
                           "worker and mover of some rank did not find each other in time");
    }
    loop_.run_once(deadline);
  }
  processes_->observe();
  return ipc::ok();
}

ipc::Status BenchInstance::run_until(const std::function<bool()>& done, std::string_view what) {
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

ipc::Status BenchInstance::run_for(ipc::Deadline until) {
  while (!until.expired()) {
    if (over_) return *over_;
    loop_.run_once(until);
  }
  return ipc::ok();
}

double BenchInstance::cpu_seconds() const {
  double seconds = cpu_seconds_of(::getpid());
  for (const pid_t pid : processes_->started()) seconds += cpu_seconds_of(pid);
  return seconds;
}

Leavings BenchInstance::end(const DeviceProbe& devices, bool failed) {
  processes_->observe();
  if (client_ != nullptr) {
    loop_.unwatch(client_->fd());
    client_.reset();
  }
  return processes_->end(devices, options_.plan.host_bytes, failed);
}

}  // namespace kvferry::cli
