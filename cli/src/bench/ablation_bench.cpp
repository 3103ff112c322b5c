// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/ablation_bench.hpp"

#include "bench/bare_copies.hpp"
#include "bench/copier/copier_instance.hpp"
#include "bench/link.hpp"
#include "bench/own_strategies.hpp"
#include "bench/recovery.hpp"
#include "bench/traffic.hpp"
#include "must.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

constexpr std::uint64_t kAblationRoom = 3;
constexpr std::uint64_t kAblationSlack = 64ULL << 20;
constexpr double kBytesOfAGiB = 1024.0 * 1024.0 * 1024.0;

/// Kills what copies these jobs, so many at a time, and tells the figure what came of it.
using Kill = std::function<void(const std::vector<Traffic::Job>&, std::uint32_t, BenchFigure&)>;

class AblationBench {
 public:
  AblationBench(BenchContext& context, const BenchShape& shape)
      : context_(context),
        config_(context.config()),
        shape_(shape),
        first_figure_(context.report.figures.size()) {}

  void run();

 private:
  [[nodiscard]] JobPlan jobs_of(std::uint32_t blocks) const {
    return plan_jobs(shape_, blocks,
                     context_.cuda() ? BareCopies::kCudaLimitBytes : BareCopies::kHostLimitBytes);
  }
  [[nodiscard]] InstancePlan plan_for(OwnStrategy strategy);
  void measure_limit(const InstancePlan& plan);
  void measure_mover(OwnStrategy strategy);
  void measure_own(OwnStrategy strategy);
  [[nodiscard]] std::uint32_t least_blocks() const;
  [[nodiscard]] std::array<std::vector<Traffic::Job>, 2> traffic_of(
      const JobPlan& plan, const std::vector<std::uint32_t>& group_blocks) const;
  void measure_cells(BenchTarget& target,
                     const BenchFigure& figure,
                     const std::vector<std::uint32_t>& group_blocks,
                     const Kill& kill);
  void measure_cell(Traffic& traffic, BenchFigure& figure);
  void compare_with_link();

  BenchContext& context_;
  const BenchConfig& config_;
  const BenchShape& shape_;
  const std::size_t first_figure_;
  LinkLimit limit_;
};

InstancePlan AblationBench::plan_for(OwnStrategy strategy) {
  std::vector<JobPlan> jobs;
  for (const std::uint32_t blocks : config_.blocks) jobs.push_back(jobs_of(blocks));
  const std::uint32_t gpu_blocks = must(gpu_blocks_for(shape_, jobs));
  return context_.plan(shape_, gpu_blocks,
                       gpu_blocks * shape_.moved_bytes() * kAblationRoom + kAblationSlack,
                       mover_strategy(strategy));
}

// Before, between and after what is compared with it, since other users of the machine come and go.
void AblationBench::measure_limit(const InstancePlan& plan) {
  context_.doing(fmt::format("{}: the link", shape_.geometry.name));
  const ipc::ArenaLayout layout = must(ipc::plan_arena(shape_.geometry, plan.arena));
  const auto device = context_.bare_device(shape_, plan);
  BareCopies copies(*device, shape_, layout, 0);
  measure_link(context_, copies, limit_);
  compare_with_link();
}

void AblationBench::compare_with_link() {
  auto& figures = context_.report.figures;
  for (std::size_t i = first_figure_; i < figures.size(); ++i) {
    figures[i].share = figures[i].gbps.median() / limit_.of(figures[i].point.way).median();
  }
}

void AblationBench::measure_cells(BenchTarget& target,
                                  const BenchFigure& figure,
                                  const std::vector<std::uint32_t>& group_blocks,
                                  const Kill& kill) {
  for (const Way way : config_.ways) {
    for (const std::uint32_t blocks : config_.blocks) {
      context_.doing(fmt::format("{}: {} {}, {}, blocks of a job: {}", shape_.geometry.name,
                                 to_string(figure.path), figure.strategy, to_string(way), blocks));
      const JobPlan plan = jobs_of(blocks);
      Traffic traffic(target, traffic_of(plan, group_blocks), plan.in_flight,
                      blocks * shape_.moved_bytes());
      must(traffic.prepare());
      BenchFigure measured = figure;
      measured.point = shape_.point(blocks, way, config_.localities.front());
      measure_cell(traffic, measured);
      must(traffic.finish());
      context_.report.figures.push_back(std::move(measured));
      compare_with_link();
      context_.check_interrupted();
    }
  }
  // Last: what a death leaves is not to be in the figures. The smallest jobs, so that it is the
  // recovery that takes the time and not the copy.
  context_.doing(fmt::format("{}: {} {} is killed", shape_.geometry.name, to_string(figure.path),
                             figure.strategy));
  const JobPlan plan = jobs_of(least_blocks());
  const auto jobs = traffic_of(plan, group_blocks);
  Traffic traffic(target, jobs, plan.in_flight, plan.blocks * shape_.moved_bytes());
  must(traffic.prepare());
  auto& figures = context_.report.figures;
  const auto last = std::find_if(figures.rbegin(), figures.rend(), [this](const auto& each) {
    return each.point.blocks == least_blocks();
  });
  kill(jobs[kToHostLane], plan.in_flight, *last);
  must(traffic.finish());
}

void AblationBench::measure_cell(Traffic& traffic, BenchFigure& figure) {
  const Way way = figure.point.way;
  double cpu_seconds = 0;
  double gib = 0;
  must(traffic.move(way, config_.bytes));  // warms up
  for (std::uint32_t i = 0; i < config_.repeats; ++i) {
    const Traffic::Moved one = must(traffic.move(way, config_.bytes));
    figure.gbps.add(static_cast<double>(one.bytes) / one.seconds / 1e9);
    cpu_seconds += one.cpu_seconds;
    gib += static_cast<double>(one.bytes) / kBytesOfAGiB;
  }
  figure.cpu_ms_per_gib = cpu_seconds * 1000 / gib;
  if (figure.point.blocks != least_blocks()) return;
  must(traffic.one_job(way, 0));  // warms up
  for (std::uint32_t i = 0; i < config_.samples; ++i) {
    figure.us.add(must(traffic.one_job(way, i)));
  }
}

std::uint32_t AblationBench::least_blocks() const {
  return *std::min_element(config_.blocks.begin(), config_.blocks.end());
}

std::array<std::vector<Traffic::Job>, 2> AblationBench::traffic_of(
    const JobPlan& plan, const std::vector<std::uint32_t>& group_blocks) const {
  const Locality locality = config_.localities.front();
  return {job_blocks(shape_, plan, locality, 0, group_blocks),
          job_blocks(shape_, plan, locality, 1, group_blocks)};
}

void AblationBench::measure_mover(OwnStrategy strategy) {
  context_.with_instance(shape_, plan_for(strategy), [&](BenchInstance& instance) {
    BenchFigure figure;
    figure.bench = to_string(BenchKind::kAblation);
    figure.path = BenchPath::kMover;
    figure.strategy = to_string(strategy);
    measure_cells(instance, figure, instance.client().state().group_blocks,
                  [&](const auto& jobs, std::uint32_t in_flight, BenchFigure& into) {
                    const std::uint64_t generation = instance.client().state().generation;
                    into.recovery_us = must(measure_recovery(instance, jobs, in_flight));
                    // The generation grows with whatever device blocks lose.
                    into.arena_kept = instance.deaths() == 1 &&
                                      instance.client().state().generation == generation;
                  });
  });
}

void AblationBench::measure_own(OwnStrategy strategy) {
  const InstancePlan plan = plan_for(strategy);
  const ipc::ArenaLayout layout = must(ipc::plan_arena(shape_.geometry, plan.arena));
  context_.with_copier(shape_, plan, strategy, [&](CopierInstance& copier) {
    BenchFigure figure;
    figure.bench = to_string(BenchKind::kAblation);
    figure.path = BenchPath::kOwn;
    figure.strategy = to_string(strategy);
    measure_cells(copier, figure, group_blocks_of(layout),
                  [&](const auto& jobs, std::uint32_t in_flight, BenchFigure& into) {
                    const worker::SequenceItem marked = jobs.front().front();
                    must(copier.write_mark(marked));
                    if (!must(copier.has_mark(marked))) {
                      throw ipc::Exception(KVFERRY_ERROR(
                          kProtocol, "a block did not come back from the device as it went there"));
                    }
                    into.recovery_us = must(measure_recovery(copier, jobs, in_flight));
                    into.arena_kept = must(copier.has_mark(marked));
                  });
  });
}

void AblationBench::run() {
  const InstancePlan first = plan_for(OwnStrategy::kMemcpy);
  const std::vector<OwnStrategy> strategies = own_strategies(config_, shape_, first.arena);
  measure_limit(first);
  for (const OwnStrategy strategy : strategies) {
    measure_mover(strategy);
    measure_own(strategy);
    measure_limit(first);
  }
}

}  // namespace

void bench_ablation(BenchContext& context, const BenchShape& shape) {
  AblationBench(context, shape).run();
}

}  // namespace kvferry::cli
