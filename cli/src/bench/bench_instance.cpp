// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/bench_instance.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "must.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

constexpr ipc::Duration kConnectTry = 200ms;
constexpr ipc::Duration kConnectRetry = 20ms;
constexpr ipc::Duration kDropped = 5s;
constexpr ipc::Duration kStatus = 5s;
constexpr ipc::Duration kPoolLook = 100ms;
constexpr std::size_t kCompletions = 64;

BenchTarget::Options with_plan(BenchTarget::Options options, const InstancePlan& plan) {
  options.instance = plan.instance;
  options.host_bytes = plan.host_bytes;
  return options;
}

}  // namespace

BenchInstance::BenchInstance(ipc::EventLoop& loop,
                             const RunDir& dir,
                             InstancePlan plan,
                             ipc::Geometry geometry,
                             Options options)
    : BenchTarget(loop, dir, with_plan(std::move(options), plan)),
      plan_(std::move(plan)),
      geometry_(std::move(geometry)) {}

BenchInstance::~BenchInstance() {
  if (client_ != nullptr) loop_.unwatch(client_->fd());
}

worker::ClientOptions BenchInstance::options_of(const std::string& engine) const {
  worker::ClientOptions options;
  options.runtime_dir = dir_.path().string();
  options.instance = plan_.instance;
  options.engine = engine;
  options.ranks = geometry_.ranks;
  options.identity.model = geometry_.name;
  options.identity.fingerprint = geometry_.fingerprint(plan_.arena.order);
  options.identity.weights = weights_;
  return options;
}

std::unique_ptr<worker::Client> BenchInstance::connect(const std::string& engine) {
  auto client =
      must(worker::Client::connect(options_of(engine), ipc::Deadline::after(options_.patience)));
  must(run_until(
      [&client] {
        (void)client->poll(1);
        return client->state().offload_ready;
      },
      fmt::format("the start of engine {}", engine)));
  return client;
}

bool BenchInstance::try_connect() {
  auto client =
      worker::Client::connect(options_of(plan_.engine), ipc::Deadline::after(kConnectTry));
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
  started_at_ = ipc::MonotonicClock::now();
  KVFERRY_TRY(processes_->start(instance_children(plan_, dir_.path())));
  processes_->observe();
  const ipc::Deadline deadline =
      ipc::Deadline::after(start_limit(options_.patience, plan_.host_bytes));
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
  if (options_.whole_pool) KVFERRY_TRY(wait_for_pool(deadline));
  processes_->observe();
  return ipc::ok();
}

// The threads that fill it would be measured with the copies, and jobs find no room before.
ipc::Status BenchInstance::wait_for_pool(ipc::Deadline deadline) {
  for (;;) {
    KVFERRY_ASSIGN(const std::string text, client_->status(ipc::Deadline::after(kStatus)));
    const auto status = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!status.is_object() || !status.contains("pool")) {
      return KVFERRY_ERROR(kProtocol, "the manager's status tells nothing of its pool");
    }
    const std::uint64_t ready = status["pool"].value("ready_bytes", std::uint64_t{0});
    const std::uint64_t all = status["pool"].value("bytes", std::uint64_t{0});
    if (ready == all) return ipc::ok();
    if (over_) return *over_;
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout, "{} of the host pool's {} are there so far",
                           ipc::format_size(ready), ipc::format_size(all));
    }
    (void)client_->poll(1);
    loop_.run_once(ipc::Deadline::after(kPoolLook).earlier(deadline));
  }
}

ipc::Result<std::uint64_t> BenchInstance::submit(std::uint64_t handle,
                                                 const std::vector<worker::SequenceItem>& blocks,
                                                 bool to_host) {
  KVFERRY_ASSIGN(const worker::JobId id,
                 to_host ? client_->swap_out(handle, blocks) : client_->swap_in(handle, blocks));
  return id.value;
}

void BenchInstance::take(const std::function<void(const Ended&)>& each) {
  for (const worker::Completion& completion : client_->poll(kCompletions)) {
    Ended ended{completion.job.value, completion.bytes, std::nullopt};
    const auto wrong = std::find_if(completion.results.begin(), completion.results.end(),
                                    [](std::uint8_t code) { return code != 0; });
    if (wrong != completion.results.end()) {
      ended.error = ipc::Error{static_cast<ipc::ErrorCode>(*wrong), completion.message};
    }
    each(ended);
  }
}

ipc::Status BenchInstance::drop(std::uint64_t handle) {
  KVFERRY_TRY(client_->drop_sequence(handle, ipc::Deadline::after(kDropped)));
  return ipc::ok();
}

std::optional<pid_t> BenchInstance::pid_of(std::string_view child) const {
  for (const auto& [name, pid] : processes_->running()) {
    if (name == child) return pid;
  }
  return std::nullopt;
}

Leavings BenchInstance::end(const DeviceProbe& devices, bool failed) {
  processes_->observe();
  if (client_ != nullptr) {
    loop_.unwatch(client_->fd());
    client_.reset();
  }
  return end_processes(devices, failed);
}

}  // namespace kvferry::cli
