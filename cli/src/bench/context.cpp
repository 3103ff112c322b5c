// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/context.hpp"

#include "kvferry/ipc/base/size.hpp"
#include "must.hpp"
#include "print.hpp"
#include "replay/sizing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;

constexpr const char* kBenchEngine = "bench";

}  // namespace

BenchContext::BenchContext(const BenchConfig& config, const RunDir& dir, ipc::SignalFd& signals)
    : config_(config), dir_(dir), signals_(signals) {
  report.ranks = config_.ranks;
  report.arena = ipc::to_string(config_.arena.order);
  report.device = "simulated device in host memory";
  if (cuda()) report.device = ipc::open_device(cuda_devices(config_.devices, 1).front())->name();
  loop_.watch(signals_.fd(), [this] { on_signal(); });
}

BenchContext::~BenchContext() {
  line_.erase();
  loop_.unwatch(signals_.fd());
}

bool BenchContext::has_one_device() const {
  if (config_.ranks == 1) return true;
  if (!cuda()) return false;
  const auto devices = cuda_devices(config_.devices, config_.ranks);
  return std::all_of(devices.begin(), devices.end(), [&](const ipc::DeviceSpec& device) {
    return device.ordinal == devices.front().ordinal;
  });
}

bool BenchContext::wants(BenchKind kind) const noexcept {
  return std::find(config_.kinds.begin(), config_.kinds.end(), kind) != config_.kinds.end();
}

void BenchContext::on_signal() {
  const int number = signals_.take();
  if (number == 0) return;
  interrupted_ = KVFERRY_ERROR(kCancelled, "interrupted by signal {}", number);
  if (target_ != nullptr) target_->interrupt(*interrupted_);
}

void BenchContext::check_interrupted() {
  loop_.run_once(ipc::Deadline::after(0s));
  if (interrupted_) throw ipc::Exception(*interrupted_);
  if (stderr_reader_gone()) {
    throw ipc::Exception(KVFERRY_ERROR(kCancelled, "nobody reads what it says on stderr any more"));
  }
}

void BenchContext::doing(const std::string& what) {
  check_interrupted();
  line_.draw(what);
}

InstancePlan BenchContext::plan(const BenchShape& shape,
                                std::uint32_t gpu_blocks,
                                std::uint64_t host_bytes,
                                cache_manager::CopyStrategy strategy) {
  InstancePlan plan;
  plan.instance = config_.instance;
  plan.engine = kBenchEngine;
  plan.log_level = config_.log_level;
  plan.geometry_name = shape.geometry_name;
  plan.gpu_blocks = gpu_blocks;
  plan.host_bytes = host_bytes;
  plan.choice = config_.arena;
  plan.strategy = strategy;
  plan.arena = make_arena_options(config_.arena, shape.geometry, gpu_blocks, config_.devices.kind);
  plan.devices = cuda_devices(config_.devices, config_.ranks);
  if (!cuda()) {
    plan.devices = must(host_devices(fmt::format("bench-{}-{}", dir_.token(), devices_++),
                                     shape.geometry, plan.arena));
  }
  const std::uint64_t available = available_host_bytes();
  if (available > 0 && host_bytes > available) {
    throw ipc::Exception(KVFERRY_ERROR(
        kInvalidArgument,
        "{} of host memory for {} blocks do not fit into the {} that this host has available; "
        "give less --blocks or --entries, or smaller chunks",
        ipc::format_size(host_bytes), gpu_blocks, ipc::format_size(available)));
  }
  return plan;
}

void BenchContext::add_engine(const BenchShape& shape,
                              const std::string& name,
                              InstancePlan& plan) {
  EnginePlan engine;
  engine.name = name;
  if (cuda()) {
    const auto before = static_cast<std::uint32_t>(1 + plan.more_engines.size()) * config_.ranks;
    engine.devices = cuda_devices(config_.devices, before + config_.ranks);
    engine.devices.erase(engine.devices.begin(), engine.devices.begin() + before);
  } else {
    engine.devices = must(host_devices(fmt::format("bench-{}-{}", dir_.token(), devices_++),
                                       shape.geometry, plan.arena));
  }
  plan.more_engines.push_back(std::move(engine));
}

BenchTarget::Options BenchContext::target_options() {
  BenchTarget::Options options;
  options.log_dir = config_.log_dir.empty() ? dir_.logs() : std::filesystem::path(config_.log_dir);
  options.patience = config_.patience;
  options.say = [this](const std::string& line) { line_.say(line); };
  return options;
}

template <typename Target>
void BenchContext::measure_on(Target& target,
                              const InstancePlan& plan,
                              const std::function<void(Target&)>& measure) {
  std::vector<ipc::DeviceSpec> named = plan.devices;
  for (const EnginePlan& engine : plan.more_engines) {
    named.insert(named.end(), engine.devices.begin(), engine.devices.end());
  }
  const DeviceProbe devices(named);
  target_ = &target;
  std::optional<ipc::Error> failed;
  try {
    must(target.start());
    measure(target);
  } catch (const ipc::Exception& error) {
    failed = error.error();
  }
  const Leavings left = target.end(devices, failed.has_value());
  target_ = nullptr;
  report.leaked_device_bytes += left.device_bytes;
  report.leaked_host_bytes += left.host_bytes;
  report.leftover_names.insert(report.leftover_names.end(), left.names.begin(), left.names.end());
  if (left.error) {
    report.errors.push_back("device memory could not be looked at: " + left.error->to_string());
  }
  if (failed) throw ipc::Exception(*failed);
}

void BenchContext::with_instance(const BenchShape& shape,
                                 const InstancePlan& plan,
                                 const std::function<void(BenchInstance&)>& measure) {
  with_instance_of(shape, plan, target_options(), measure);
}

void BenchContext::with_young_instance(const BenchShape& shape,
                                       const InstancePlan& plan,
                                       const std::function<void(BenchInstance&)>& measure) {
  BenchTarget::Options options = target_options();
  options.whole_pool = false;
  with_instance_of(shape, plan, std::move(options), measure);
}

void BenchContext::with_instance_of(const BenchShape& shape,
                                    const InstancePlan& plan,
                                    BenchTarget::Options options,
                                    const std::function<void(BenchInstance&)>& measure) {
  doing(fmt::format("{}: starting processes, copy strategy {}", shape.geometry.name,
                    cache_manager::to_string(plan.strategy)));
  BenchInstance instance(loop_, dir_, plan, shape.geometry, std::move(options));
  measure_on(instance, plan, measure);
}

void BenchContext::with_copier(const BenchShape& shape,
                               const InstancePlan& plan,
                               OwnStrategy strategy,
                               const std::function<void(CopierInstance&)>& measure) {
  doing(fmt::format("{}: starting a worker that copies by itself: {}", shape.geometry.name,
                    to_string(strategy)));
  CopierInstance instance(loop_, dir_, plan, strategy,
                          must(ipc::plan_arena(shape.geometry, plan.arena)), target_options());
  measure_on(instance, plan, measure);
}

std::unique_ptr<ipc::Device> BenchContext::bare_device(const BenchShape& shape,
                                                       const InstancePlan& plan) {
  ipc::DeviceSpec spec = plan.devices.front();
  if (!cuda()) {
    spec = must(
        host_device_for(fmt::format("bench-{}-bare", dir_.token()), shape.geometry, plan.arena));
  }
  auto device = ipc::open_device(spec);
  return device;
}

}  // namespace kvferry::cli
