// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/interference_bench.hpp"

#include "bench/bare_copies.hpp"
#include "bench/load_times.hpp"
#include "bench/traffic.hpp"
#include "must.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;

/// Of each phase of a pair.
constexpr ipc::Duration kPhase = 200ms;
/// Until the load runs evenly, and before copies count.
constexpr ipc::Duration kWarmUp = 300ms;
constexpr ipc::Duration kTimesLook = 20ms;
/// Of one call for copies, after which the link idles for a moment.
constexpr std::uint64_t kCudaCallBytes = 2ULL << 30;
constexpr std::uint64_t kHostCallBytes = 4ULL << 20;
/// Some of them are slow.
constexpr std::uint64_t kBareCallBytes = 256ULL << 20;
constexpr std::uint64_t kCudaJobsSpan = 256ULL << 20;
constexpr std::uint64_t kHostJobsSpan = 16ULL << 20;
constexpr std::uint64_t kRoomForSwaps = 3;
constexpr std::uint64_t kRoomForSlabs = 64ULL << 20;
constexpr double kTail = 0.99;

/// Moves so many bytes, and says how many.
using Copies = std::function<std::uint64_t()>;

struct Phase {
  ipc::TimePoint from;
  ipc::TimePoint to;
  std::uint64_t bytes = 0;
};

double mean_of(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

class InterferenceBench {
 public:
  InterferenceBench(BenchContext& context, const BenchShape& shape)
      : context_(context), config_(context.config()), shape_(shape) {}

  void run();

 private:
  [[nodiscard]] std::uint64_t call_bytes() const {
    return context_.cuda() ? kCudaCallBytes : kHostCallBytes;
  }
  [[nodiscard]] JobPlan jobs(std::uint32_t blocks) const {
    return plan_jobs(shape_, blocks, context_.cuda() ? kCudaJobsSpan : kHostJobsSpan);
  }
  [[nodiscard]] std::array<std::vector<Traffic::Job>, 2> jobs_of(
      const JobPlan& plan, const std::vector<std::uint32_t>& group_blocks) const;
  [[nodiscard]] InstancePlan plan_for(cache_manager::CopyStrategy strategy,
                                      worker::ComputeLoadKind load);
  void measure_link(const InstancePlan& plan);
  void measure_engine(BenchInstance& instance,
                      LoadTimes& times,
                      cache_manager::CopyStrategy strategy,
                      worker::ComputeLoadKind load);
  void measure_bare(BenchInstance& instance,
                    LoadTimes& times,
                    const InstancePlan& plan,
                    worker::ComputeLoadKind load);
  void measure_pairs(BenchInstance& instance,
                     LoadTimes& times,
                     BenchFigure figure,
                     const Copies& copies);
  static void rest(BenchInstance& instance, ipc::Duration time);
  void await_times(BenchInstance& instance, LoadTimes& times, ipc::TimePoint until);

  BenchContext& context_;
  const BenchConfig& config_;
  const BenchShape& shape_;
  LinkLimit limit_;
  std::uint32_t files_ = 0;
  std::filesystem::path times_file_;
};

InstancePlan InterferenceBench::plan_for(cache_manager::CopyStrategy strategy,
                                         worker::ComputeLoadKind load) {
  std::vector<JobPlan> all;
  for (const std::uint32_t blocks : config_.blocks) all.push_back(jobs(blocks));
  const std::uint32_t gpu_blocks = must(gpu_blocks_for(shape_, all));
  InstancePlan plan =
      context_.plan(shape_, gpu_blocks,
                    gpu_blocks * shape_.moved_bytes() * kRoomForSwaps + kRoomForSlabs, strategy);
  times_file_ = context_.dir().path() / fmt::format("load-{}.times", ++files_);
  plan.worker_arguments.push_back(fmt::format("--load={}", worker::to_string(load)));
  plan.worker_arguments.push_back("--load-times=" + times_file_.native());
  return plan;
}

void InterferenceBench::measure_link(const InstancePlan& plan) {
  context_.doing(fmt::format("{}: the link, idle", shape_.geometry.name));
  const ipc::ArenaLayout layout = must(ipc::plan_arena(shape_.geometry, plan.arena));
  const auto device = context_.bare_device(shape_, plan);
  BareCopies copies(*device, shape_, layout, 0);
  for (const Way way : {Way::kToHost, Way::kToDevice, Way::kBoth}) {
    must(copies.limit(way));  // the first one warms up
    for (std::uint32_t i = 0; i < config_.repeats; ++i) {
      const double gbps = must(copies.limit(way));
      limit_.of(way).add(gbps);
      context_.report.limit.of(way).add(gbps);
    }
  }
}

void InterferenceBench::rest(BenchInstance& instance, ipc::Duration time) {
  const ipc::Deadline end = ipc::Deadline::after(time);
  must(instance.run_for(end));
}

void InterferenceBench::await_times(BenchInstance& instance,
                                    LoadTimes& times,
                                    ipc::TimePoint until) {
  const ipc::Deadline deadline = ipc::Deadline::after(config_.patience);
  for (;;) {
    must(times.read());
    if (const auto last = times.last(); last && *last >= until) return;
    if (deadline.expired()) {
      throw ipc::Exception(KVFERRY_ERROR(kTimeout,
                                         "the worker's load told no time in {} ms; see the logs",
                                         config_.patience.count()));
    }
    rest(instance, kTimesLook);
  }
}

void InterferenceBench::measure_pairs(BenchInstance& instance,
                                      LoadTimes& times,
                                      BenchFigure figure,
                                      const Copies& copies) {
  context_.doing(fmt::format("{}: {} beside {}, {}", shape_.geometry.name, figure.strategy,
                             figure.load, to_string(figure.point.way)));
  const auto copy = [&](ipc::Duration time) {
    Phase phase{ipc::MonotonicClock::now(), {}, 0};
    const ipc::Deadline end = ipc::Deadline::at(phase.from + time);
    do {
      phase.bytes += copies();
    } while (!end.expired());
    phase.to = ipc::MonotonicClock::now();
    return phase;
  };
  (void)copy(kWarmUp);
  std::vector<std::pair<Phase, Phase>> pairs;  // without copies, with
  for (std::uint32_t i = 0; i < config_.pairs; ++i) {
    Phase without{ipc::MonotonicClock::now(), {}, 0};
    rest(instance, kPhase);
    without.to = ipc::MonotonicClock::now();
    pairs.emplace_back(without, copy(kPhase));
    context_.check_interrupted();
  }
  await_times(instance, times, pairs.back().second.to);
  Samples all_without;
  Samples all_with;
  for (const auto& [without, with] : pairs) {
    Samples rounds_without;
    Samples rounds_with;
    times.add_within(without.from, without.to, rounds_without);
    times.add_within(with.from, with.to, rounds_with);
    const double seconds = std::chrono::duration<double>(with.to - with.from).count();
    figure.gbps.add(static_cast<double>(with.bytes) / seconds / 1e9);
    if (rounds_without.empty() || rounds_with.empty()) continue;  // rounds longer than a phase
    figure.slowdown.add(mean_of(rounds_with.values()) / mean_of(rounds_without.values()));
    all_without.add_all(rounds_without);
    all_with.add_all(rounds_with);
  }
  if (figure.slowdown.empty()) {
    throw ipc::Exception(KVFERRY_ERROR(
        kTimeout, "load {}: no round ended within {} ms; this device is too slow for it",
        figure.load, std::chrono::duration_cast<std::chrono::milliseconds>(kPhase).count()));
  }
  figure.round_us = RoundTimes{all_without.median(), all_without.quantile(kTail), all_with.median(),
                               all_with.quantile(kTail)};
  figure.share = figure.gbps.median() / limit_.of(figure.point.way).median();
  context_.report.figures.push_back(std::move(figure));
}

void InterferenceBench::measure_engine(BenchInstance& instance,
                                       LoadTimes& times,
                                       cache_manager::CopyStrategy strategy,
                                       worker::ComputeLoadKind load) {
  const std::vector<std::uint32_t> group_blocks = instance.client().state().group_blocks;
  for (const std::uint32_t blocks : config_.blocks) {
    for (const Way way : config_.ways) {
      const JobPlan plan = jobs(blocks);
      Traffic traffic(instance, jobs_of(plan, group_blocks), plan.in_flight,
                      blocks * shape_.moved_bytes());
      must(traffic.prepare());
      BenchFigure figure;
      figure.bench = to_string(BenchKind::kInterference);
      figure.strategy = cache_manager::to_string(strategy);
      figure.load = worker::to_string(load);
      figure.point = shape_.point(blocks, way, config_.localities.front());
      measure_pairs(instance, times, std::move(figure),
                    [&] { return must(traffic.move(way, call_bytes())).bytes; });
      must(traffic.finish());
    }
  }
}

std::array<std::vector<Traffic::Job>, 2> InterferenceBench::jobs_of(
    const JobPlan& plan, const std::vector<std::uint32_t>& group_blocks) const {
  const Locality locality = config_.localities.front();
  return {job_blocks(shape_, plan, locality, 0, group_blocks),
          job_blocks(shape_, plan, locality, 1, group_blocks)};
}

// From this process, as a mover would: in another context than the load.
void InterferenceBench::measure_bare(BenchInstance& instance,
                                     LoadTimes& times,
                                     const InstancePlan& plan,
                                     worker::ComputeLoadKind load) {
  const ipc::ArenaLayout layout = must(ipc::plan_arena(shape_.geometry, plan.arena));
  const auto device = context_.bare_device(shape_, plan);
  // One kind of job is enough: they are not compared with each other.
  const std::uint32_t blocks = config_.blocks.front();
  BareCopies copies(*device, shape_, layout, config_.bare ? blocks : 0);
  std::vector<std::uint32_t> group_blocks;
  for (const ipc::GroupLayout& group : layout.groups) group_blocks.push_back(group.block_count);
  const BareCopies::Jobs scattered = jobs_of(jobs(blocks), group_blocks);
  for (const Way way : config_.ways) {
    BenchFigure figure;
    figure.bench = to_string(BenchKind::kInterference);
    figure.path = BenchPath::kBare;
    figure.load = worker::to_string(load);
    figure.point = shape_.point(blocks, way, config_.localities.front());
    figure.point.block_bytes = shape_.rank_bytes();
    const std::uint64_t ways = way == Way::kBoth ? 2 : 1;
    BenchFigure large = figure;
    large.strategy = "one copy";
    measure_pairs(instance, times, std::move(large), [&] {
      must(copies.limit(way));
      return ways * copies.limit_bytes();
    });
    if (!config_.bare || !context_.cuda()) continue;  // a simulated device knows memcpy alone
    for (const BareStrategy strategy : kBareStrategies) {
      BenchFigure each = figure;
      each.strategy = to_string(strategy);
      measure_pairs(instance, times, std::move(each), [&] {
        must(copies.move(strategy, way, scattered, kBareCallBytes));
        return ways * kBareCallBytes;
      });
    }
  }
}

void InterferenceBench::run() {
  using cache_manager::CopyStrategy;
  const std::vector<CopyStrategy> strategies =
      config_.strategies.empty() ? std::vector{CopyStrategy::kAuto} : config_.strategies;
  bool link_known = false;
  for (const worker::ComputeLoadKind load : config_.loads) {
    bool bare = true;  // beside the first instance of a load, which goes with it
    for (const CopyStrategy strategy : strategies) {
      const InstancePlan plan = plan_for(strategy, load);
      if (!std::exchange(link_known, true)) measure_link(plan);
      context_.with_instance(shape_, plan, [&](BenchInstance& instance) {
        LoadTimes times(times_file_);
        await_times(instance, times, ipc::MonotonicClock::now());
        measure_engine(instance, times, strategy, load);
        // After it: this process has a context on the device from then on.
        if (std::exchange(bare, false)) measure_bare(instance, times, plan, load);
      });
    }
  }
}

}  // namespace

void bench_interference(BenchContext& context, const BenchShape& shape) {
  InterferenceBench(context, shape).run();
}

}  // namespace kvferry::cli
