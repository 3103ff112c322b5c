// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/interference_bench.hpp"

#include "bench/bare_copies.hpp"
#include "bench/link.hpp"
#include "bench/load_times.hpp"
#include "bench/own_strategies.hpp"
#include "bench/pair_rounds.hpp"
#include "bench/traffic.hpp"
#include "must.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <string>
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
/// Some of them are slow.
constexpr std::uint64_t kBareCallBytes = 256ULL << 20;
constexpr std::uint64_t kCudaJobsSpan = 256ULL << 20;
constexpr std::uint64_t kHostJobsSpan = 16ULL << 20;
constexpr std::uint64_t kRoomForSwaps = 3;
constexpr std::uint64_t kRoomForSlabs = 64ULL << 20;

using Phase = Traffic::Window;
/// Copies all the time, for so long.
using Copies = std::function<Phase(ipc::Duration)>;

/// By calls one after the other, each of which says how many bytes it moved.
Copies calls(std::function<std::uint64_t()> call) {
  return [call = std::move(call)](ipc::Duration time) {
    Phase phase{ipc::MonotonicClock::now(), {}, 0};
    const ipc::Deadline end = ipc::Deadline::at(phase.from + time);
    do {
      phase.bytes += call();
    } while (!end.expired());
    phase.to = ipc::MonotonicClock::now();
    return phase;
  };
}

std::uint64_t large_copy(BareCopies& copies, Way way) {
  must(copies.limit(way));
  return (way == Way::kBoth ? 2 : 1) * copies.limit_bytes();
}

double gbps_of(const Phase& phase) {
  const double seconds = std::chrono::duration<double>(phase.to - phase.from).count();
  return static_cast<double>(phase.bytes) / seconds / 1e9;
}

BenchFigure figure_of(worker::ComputeLoadKind load) {
  BenchFigure figure;
  figure.bench = to_string(BenchKind::kInterference);
  figure.load = worker::to_string(load);
  return figure;
}

class InterferenceBench {
 public:
  InterferenceBench(BenchContext& context, const BenchShape& shape)
      : context_(context), config_(context.config()), shape_(shape) {}

  void run();

 private:
  [[nodiscard]] JobPlan jobs(std::uint32_t blocks) const {
    return plan_jobs(shape_, blocks, context_.cuda() ? kCudaJobsSpan : kHostJobsSpan);
  }
  [[nodiscard]] std::array<std::vector<Traffic::Job>, 2> jobs_of(
      const JobPlan& plan, Locality locality, const std::vector<std::uint32_t>& group_blocks) const;
  /// Every kind of job: blocks, and where they lie.
  void for_each_kind(const std::function<void(std::uint32_t blocks, Locality)>& measure) const {
    for (const std::uint32_t blocks : config_.blocks) {
      for (const Locality locality : config_.localities) measure(blocks, locality);
    }
  }
  [[nodiscard]] InstancePlan plan_for(cache_manager::CopyStrategy strategy,
                                      worker::ComputeLoadKind load);
  void measure_link(const InstancePlan& plan);
  void measure_jobs(BenchTarget& target,
                    RanksLoadTimes& times,
                    const std::vector<std::uint32_t>& group_blocks,
                    const BenchFigure& figure);
  void measure_own(OwnStrategy strategy, worker::ComputeLoadKind load);
  void measure_bare(BenchTarget& target,
                    RanksLoadTimes& times,
                    const InstancePlan& plan,
                    worker::ComputeLoadKind load);
  void measure_pairs(BenchTarget& target,
                     RanksLoadTimes& times,
                     BenchFigure figure,
                     const Copies& copies,
                     const Copies& large = {});
  static void rest(BenchTarget& target, ipc::Duration time);
  void await_times(BenchTarget& target, RanksLoadTimes& times, ipc::TimePoint until);

  BenchContext& context_;
  const BenchConfig& config_;
  const BenchShape& shape_;
  LinkLimit limit_;
  /// What is compared with, in the same pairs, where all ranks copy over its link.
  BareCopies* large_ = nullptr;
  std::uint32_t files_ = 0;
  std::vector<std::filesystem::path> times_files_;  ///< Of each rank.
};

InstancePlan InterferenceBench::plan_for(cache_manager::CopyStrategy strategy,
                                         worker::ComputeLoadKind load) {
  std::vector<JobPlan> all;
  for (const std::uint32_t blocks : config_.blocks) all.push_back(jobs(blocks));
  const std::uint32_t gpu_blocks = must(gpu_blocks_for(shape_, all));
  InstancePlan plan =
      context_.plan(shape_, gpu_blocks,
                    gpu_blocks * shape_.moved_bytes() * kRoomForSwaps + kRoomForSlabs, strategy);
  const std::string times =
      (context_.dir().path() / fmt::format("load-{}.{{rank}}.times", ++files_)).native();
  times_files_.clear();
  for (std::size_t r = 0; r < plan.devices.size(); ++r) {
    times_files_.emplace_back(for_rank(times, r));
  }
  plan.worker_arguments.push_back(fmt::format("--load={}", worker::to_string(load)));
  plan.worker_arguments.push_back("--load-times=" + times);
  return plan;
}

void InterferenceBench::measure_link(const InstancePlan& plan) {
  context_.doing(fmt::format("{}: the link, idle", shape_.geometry.name));
  const ipc::ArenaLayout layout = must(ipc::plan_arena(shape_.geometry, plan.arena));
  const auto device = context_.bare_device(shape_, plan);
  BareCopies copies(*device, shape_, layout, 0);
  cli::measure_link(context_, copies, limit_);
}

void InterferenceBench::rest(BenchTarget& target, ipc::Duration time) {
  const ipc::Deadline end = ipc::Deadline::after(time);
  must(target.run_for(end));
}

void InterferenceBench::await_times(BenchTarget& target,
                                    RanksLoadTimes& times,
                                    ipc::TimePoint until) {
  const ipc::Deadline deadline = ipc::Deadline::after(config_.patience);
  for (;;) {
    must(times.read());
    if (const auto last = times.last(); last && *last >= until) return;
    if (deadline.expired()) {
      throw ipc::Exception(
          KVFERRY_ERROR(kTimeout, "the load of some worker told no time in {} ms; see the logs",
                        config_.patience.count()));
    }
    rest(target, kTimesLook);
  }
}

void InterferenceBench::measure_pairs(BenchTarget& target,
                                      RanksLoadTimes& times,
                                      BenchFigure figure,
                                      const Copies& copies,
                                      const Copies& large) {
  context_.doing(fmt::format("{}: {} beside {}, {}", shape_.geometry.name, figure.strategy,
                             figure.load, to_string(figure.point.way)));
  (void)copies(kWarmUp);
  if (large) (void)large(kWarmUp);
  struct Round {
    Phase without;
    Phase with;
    std::optional<Phase> beside_large;
  };
  std::vector<Round> rounds;
  for (std::uint32_t i = 0; i < config_.pairs; ++i) {
    Round& round = rounds.emplace_back();
    round.without.from = ipc::MonotonicClock::now();
    rest(target, kPhase);
    round.without.to = ipc::MonotonicClock::now();
    // In turns, so that what comes and goes on the machine meets both.
    const bool large_first = i % 2 == 1;
    if (large && large_first) round.beside_large = large(kPhase);
    round.with = copies(kPhase);
    if (large && !large_first) round.beside_large = large(kPhase);
    context_.check_interrupted();
  }
  await_times(target, times, ipc::MonotonicClock::now());
  std::vector<PairRounds> pairs;
  for (const auto& [without, with, beside_large] : rounds) {
    figure.gbps.add(gbps_of(with));
    PairRounds& pair = pairs.emplace_back();
    times.add_within(without.from, without.to, pair.without);
    times.add_within(with.from, with.to, pair.beside);
    if (!beside_large) continue;
    figure.copy_gbps.add(gbps_of(*beside_large));
    times.add_within(beside_large->from, beside_large->to, pair.beside_copy);
  }
  add_pairs(pairs, figure);
  if (figure.slowdown.empty()) {
    throw ipc::Exception(KVFERRY_ERROR(
        kTimeout, "load {}: no round ended within {} ms; this device is too slow for it",
        figure.load, std::chrono::duration_cast<std::chrono::milliseconds>(kPhase).count()));
  }
  // The link is one device's; bare copies go over no other.
  if (figure.path == BenchPath::kBare || context_.has_one_device()) {
    figure.share = figure.gbps.median() / limit_.of(figure.point.way).median();
  }
  context_.report.figures.push_back(std::move(figure));
}

void InterferenceBench::measure_jobs(BenchTarget& target,
                                     RanksLoadTimes& times,
                                     const std::vector<std::uint32_t>& group_blocks,
                                     const BenchFigure& figure) {
  for_each_kind([&](std::uint32_t blocks, Locality locality) {
    for (const Way way : config_.ways) {
      const JobPlan plan = jobs(blocks);
      Traffic traffic(target, jobs_of(plan, locality, group_blocks), plan.in_flight,
                      blocks * shape_.moved_bytes());
      must(traffic.prepare());
      BenchFigure measured = figure;
      measured.point = shape_.point(blocks, way, locality);
      measure_pairs(
          target, times, std::move(measured),
          [&](ipc::Duration time) { return must(traffic.move_for(way, time)); },
          large_ != nullptr ? calls([&] { return large_copy(*large_, way); }) : Copies());
      must(traffic.finish());
    }
  });
}

// In the load's own process.
void InterferenceBench::measure_own(OwnStrategy strategy, worker::ComputeLoadKind load) {
  const InstancePlan plan = plan_for(mover_strategy(strategy), load);
  const ipc::ArenaLayout layout = must(ipc::plan_arena(shape_.geometry, plan.arena));
  context_.with_copier(shape_, plan, strategy, [&](CopierInstance& copier) {
    RanksLoadTimes times(times_files_);
    await_times(copier, times, ipc::MonotonicClock::now());
    BenchFigure figure = figure_of(load);
    figure.path = BenchPath::kOwn;
    figure.strategy = to_string(strategy);
    measure_jobs(copier, times, group_blocks_of(layout), figure);
  });
}

std::array<std::vector<Traffic::Job>, 2> InterferenceBench::jobs_of(
    const JobPlan& plan, Locality locality, const std::vector<std::uint32_t>& group_blocks) const {
  return {job_blocks(shape_, plan, locality, 0, group_blocks),
          job_blocks(shape_, plan, locality, 1, group_blocks)};
}

// From this process, as a mover would: in another context than the load.
void InterferenceBench::measure_bare(BenchTarget& target,
                                     RanksLoadTimes& times,
                                     const InstancePlan& plan,
                                     worker::ComputeLoadKind load) {
  const ipc::ArenaLayout layout = must(ipc::plan_arena(shape_.geometry, plan.arena));
  const auto device = context_.bare_device(shape_, plan);
  const bool others = config_.bare && context_.cuda();  // a simulated device knows memcpy alone
  const std::uint32_t most = *std::max_element(config_.blocks.begin(), config_.blocks.end());
  BareCopies copies(*device, shape_, layout, others ? most : 0);
  const auto figure_for = [&](std::uint32_t blocks, Way way, Locality locality) {
    BenchFigure figure = figure_of(load);
    figure.path = BenchPath::kBare;
    figure.point = shape_.point(blocks, way, locality);
    figure.point.block_bytes = shape_.rank_bytes();
    return figure;
  };
  for (const Way way : config_.ways) {
    BenchFigure large = figure_for(config_.blocks.front(), way, config_.localities.front());
    large.strategy = kOneCopy;  // of no kind of job
    measure_pairs(target, times, std::move(large), calls([&] { return large_copy(copies, way); }));
  }
  if (!others) return;
  for_each_kind([&](std::uint32_t blocks, Locality locality) {
    const BareCopies::Jobs scattered = jobs_of(jobs(blocks), locality, group_blocks_of(layout));
    for (const Way way : config_.ways) {
      const std::uint64_t ways = way == Way::kBoth ? 2 : 1;
      for (const BareStrategy strategy : kBareStrategies) {
        BenchFigure each = figure_for(blocks, way, locality);
        each.strategy = to_string(strategy);
        measure_pairs(target, times, std::move(each), calls([&] {
                        must(copies.move(strategy, way, scattered, kBareCallBytes));
                        return ways * kBareCallBytes;
                      }));
      }
    }
  });
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
        RanksLoadTimes times(times_files_);
        await_times(instance, times, ipc::MonotonicClock::now());
        BenchFigure figure = figure_of(load);
        figure.strategy = cache_manager::to_string(strategy);
        {
          const ipc::ArenaLayout layout = must(ipc::plan_arena(shape_.geometry, plan.arena));
          const auto device = context_.bare_device(shape_, plan);
          BareCopies large(*device, shape_, layout, 0);
          if (context_.has_one_device()) large_ = &large;
          measure_jobs(instance, times, instance.client().state().group_blocks, figure);
          large_ = nullptr;
        }
        if (std::exchange(bare, false)) measure_bare(instance, times, plan, load);
      });
    }
    if (!context_.wants(BenchKind::kAblation)) continue;
    const ipc::ArenaOptions arena =
        make_arena_options(config_.arena, shape_.geometry, 0, config_.devices.kind);
    for (const OwnStrategy strategy : own_strategies(config_, shape_, arena)) {
      measure_own(strategy, load);
    }
  }
}

}  // namespace

void bench_interference(BenchContext& context, const BenchShape& shape) {
  InterferenceBench(context, shape).run();
}

}  // namespace kvferry::cli
