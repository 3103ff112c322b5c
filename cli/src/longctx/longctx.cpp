// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "longctx/longctx.hpp"

#include "bench/bare_copies.hpp"
#include "bench/bench.hpp"
#include "bench/context.hpp"
#include "bench/link.hpp"
#include "bench/shape.hpp"
#include "command.hpp"
#include "longctx/engine.hpp"
#include "longctx/report.hpp"
#include "must.hpp"
#include "options.hpp"
#include "print.hpp"
#include "replay/sizing.hpp"
#include "run/leak_check.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

namespace kvferry::cli {
namespace {

/// Of the arena that is beside the measurement of the link; its copies have memory of their own.
constexpr std::uint32_t kLinkBlocks = 1;
constexpr std::uint32_t kLinkRepeats = 3;
/// A pool for an instance that stores nothing.
constexpr std::uint64_t kLeastPool = 64ULL << 20;
constexpr std::uint64_t kJobBytes = 32ULL << 20;
constexpr std::uint32_t kMostJobBlocks = 4096;
constexpr std::uint32_t kJobsEachWay = 8;

BenchConfig bench_config_of(const LongctxConfig& config) {
  BenchConfig bench;
  bench.runtime_base = config.runtime_base;
  bench.instance = config.instance;
  bench.log_level = config.log_level;
  bench.log_dir = config.log_dir;
  bench.devices = config.devices;
  bench.ranks = config.geometry.ranks;
  bench.arena = config.arena;
  bench.repeats = kLinkRepeats;
  bench.patience = config.patience;
  return bench;
}

/// All runs of one command, one after the other.
class LongctxRuns {
 public:
  LongctxRuns(const LongctxConfig& config, BenchContext& context, LongctxReport& report)
      : config_(config), context_(context), report_(report) {
    shape_.geometry = config.geometry;
    shape_.geometry_name = config.geometry_name;
  }

  void run() {
    decide();
    measure_link();
    if (config_.check && report_.sizes.reference_blocks > 0) run_without_swaps();
    run_with_swaps();
  }

 private:
  void decide();
  void measure_link();
  void run_without_swaps();
  void run_with_swaps();
  [[nodiscard]] std::uint32_t links() const;
  [[nodiscard]] LongctxEngine::Options options(const InstancePlan& plan) const;

  const LongctxConfig& config_;
  BenchContext& context_;
  LongctxReport& report_;
  BenchShape shape_;
};

void LongctxRuns::decide() {
  std::uint64_t device_free = 0;
  if (context_.cuda()) {
    const DeviceProbe probe(cuda_devices(config_.devices, config_.geometry.ranks));
    // Contexts, staging and scratch of two processes take their part.
    device_free = probe.smallest_free_bytes() / 10 * 9;
  }
  report_.sizes = must(decide_sizes(config_, available_host_bytes(), device_free));
}

/// Ranks copy at the same time: over a link for each GPU, and on a processor for each simulated
/// device.
std::uint32_t LongctxRuns::links() const {
  if (!context_.cuda()) return config_.geometry.ranks;
  std::set<int> ordinals;
  for (const ipc::DeviceSpec& device : cuda_devices(config_.devices, config_.geometry.ranks)) {
    ordinals.insert(device.ordinal);
  }
  return static_cast<std::uint32_t>(ordinals.size());
}

void LongctxRuns::measure_link() {
  context_.doing("the link");
  const InstancePlan plan =
      context_.plan(shape_, kLinkBlocks, 0, cache_manager::CopyStrategy::kAuto);
  const auto device = context_.bare_device(shape_, plan);
  BareCopies copies(*device, shape_, must(ipc::plan_arena(shape_.geometry, plan.arena)), 0);
  LinkLimit limit;
  cli::measure_link(context_, copies, limit);
  report_.link.to_host = limit.to_host.median() * 1e9 * links();
  report_.link.to_device = limit.to_device.median() * 1e9 * links();
}

LongctxEngine::Options LongctxRuns::options(const InstancePlan& plan) const {
  const LongctxSizes& sizes = report_.sizes;
  LongctxEngine::Options options;
  options.engine = plan.engine;
  options.geometry = config_.geometry;
  options.sequences = config_.sequences;
  options.context = config_.context;
  options.steps = config_.steps;
  options.seed = config_.seed;
  options.doing = [this](const std::string& what) { context_.doing(what); };
  TurnScheduler::Limits& limits = options.limits;
  limits.device_blocks = plan.gpu_blocks;
  limits.host_blocks = sizes.host_bytes / sizes.block_bytes;
  limits.active_blocks = sizes.active_blocks;
  limits.tokens_per_block = config_.geometry.tokens_per_block;
  limits.slice = config_.slice;
  limits.job_blocks = static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(kJobBytes / sizes.block_bytes, 1, kMostJobBlocks));
  limits.jobs_each_way = kJobsEachWay;
  limits.window_blocks = limits.job_blocks * kJobsEachWay;
  return options;
}

void LongctxRuns::run_without_swaps() {
  const LongctxSizes& sizes = report_.sizes;
  const InstancePlan plan =
      context_.plan(shape_, sizes.reference_blocks, kLeastPool, cache_manager::CopyStrategy::kAuto);
  context_.with_instance(shape_, plan, [&](BenchInstance& instance) {
    const auto dir = must(ipc::RuntimeDir::open(context_.dir().path().string(), plan.instance));
    LongctxEngine::Options options = this->options(plan);
    // Nothing is ever stored.
    options.limits.host_blocks = std::numeric_limits<std::uint64_t>::max();
    if (!sizes.has_large_arena()) {
      options.at_a_time = std::clamp(sizes.active_blocks / sizes.sequence_blocks, 1U,
                                     options.limits.active_sequences);
    }
    report_.no_swap = LongctxEngine(instance, dir, std::move(options)).run();
  });
}

void LongctxRuns::run_with_swaps() {
  const InstancePlan plan =
      context_.plan(shape_, report_.sizes.gpu_blocks, report_.sizes.host_bytes,
                    cache_manager::CopyStrategy::kAuto);
  context_.with_instance(shape_, plan, [&](BenchInstance& instance) {
    const auto dir = must(ipc::RuntimeDir::open(context_.dir().path().string(), plan.instance));
    report_.look_ahead = LongctxEngine(instance, dir, options(plan)).run();
    LongctxEngine::Options serial = options(plan);
    serial.limits.look_ahead = false;
    serial.first_handle += config_.sequences;
    report_.without = LongctxEngine(instance, dir, std::move(serial)).run();
  });
}

/// The report holds what was measured, whatever ended the run.
LongctxReport measure(const LongctxConfig& config, const RunDir& dir, ipc::SignalFd& signals) {
  const BenchConfig bench = bench_config_of(config);
  BenchContext context(bench, dir, signals);
  LongctxReport report;
  report.config = config;
  report.device = context.report.device;
  report.is_simulated = !context.cuda();
  try {
    LongctxRuns(config, context, report).run();
  } catch (const ipc::Exception& error) {
    report.errors.push_back(error.error().to_string());
  }
  report.errors.insert(report.errors.end(), context.report.errors.begin(),
                       context.report.errors.end());
  report.leaked_device_bytes = context.report.leaked_device_bytes;
  report.leaked_host_bytes = context.report.leaked_host_bytes;
  report.leftover_names = context.report.leftover_names;
  return report;
}

}  // namespace

int run_longctx(const LongctxConfig& config) {
  try {
    ipc::SignalFd signals;  // before anything that would be left behind, or starts threads
    auto dir = RunDir::create(config.runtime_base, "longctx");
    if (!dir) return failure("longctx", dir.error());
    const LongctxReport report = measure(config, *dir, signals);
    if (config.json) {
      (void)write_out(to_json(report).dump(2) + "\n");
    } else if (report.look_ahead) {
      (void)write_out(table_of(report));
    }
    if (!config.log_dir.empty()) print_err("logs of the processes: {}\n", config.log_dir);
    int code = kExitDone;
    for (const std::string& reason : failures_of(report)) {
      print_err("kvferry longctx: FAILED: {}\n", reason);
      code = kExitFailed;
    }
    return code;
  } catch (const ipc::Exception& error) {
    return failure("longctx", error.error());
  }
}

}  // namespace kvferry::cli
