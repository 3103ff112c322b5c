// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/transfer_bench.hpp"

#include "bench/bare_copies.hpp"
#include "bench/link.hpp"
#include "bench/traffic.hpp"
#include "must.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

namespace kvferry::cli {
namespace {

/// Of all jobs of one way together, as large as the copies that the link is measured by.
constexpr std::uint64_t kCudaSpan = BareCopies::kCudaLimitBytes;
constexpr std::uint64_t kHostSpan = BareCopies::kHostLimitBytes;
/// A swapped-out block is replaced when its successor is whole; and slabs are not all full.
constexpr std::uint64_t kHostRoom = 3;
constexpr std::uint64_t kSlabSlackBytes = 64ULL << 20;
constexpr double kBytesPerGiB = 1024.0 * 1024.0 * 1024.0;

struct Cell {
  std::uint32_t blocks = 0;
  Locality locality = Locality::kSequential;
  Way way = Way::kToHost;
};

/// One cache: the link, bare copies, and every strategy through an instance of its own.
class TransferBench {
 public:
  TransferBench(BenchContext& context, const BenchShape& shape)
      : context_(context),
        config_(context.config()),
        shape_(shape),
        first_figure_(context.report.figures.size()) {}

  void run();

 private:
  [[nodiscard]] std::vector<Cell> cells() const;
  [[nodiscard]] JobPlan jobs_of(std::uint32_t blocks) const {
    return plan_jobs(shape_, blocks, context_.cuda() ? kCudaSpan : kHostSpan);
  }
  [[nodiscard]] std::array<std::vector<Traffic::Job>, 2> traffic_of(
      const Cell& cell, const std::vector<std::uint32_t>& group_blocks) const;
  [[nodiscard]] InstancePlan plan_for(cache_manager::CopyStrategy strategy);
  [[nodiscard]] std::vector<cache_manager::CopyStrategy> strategies_for(
      const ipc::ArenaOptions& arena) const;
  /// Bare copies beside no instance; most_blocks of one job, or none but the link's own.
  void with_bare_copies(const InstancePlan& plan,
                        std::uint32_t most_blocks,
                        const std::function<void(BareCopies&, const ipc::ArenaLayout&)>& measure);
  /// Adds to what is known of the link: it is looked at before, between and after what is compared
  /// with it, since other users of the machine come and go.
  void measure_link(BareCopies& copies);
  void measure_bare(const InstancePlan& plan);
  void measure_bare_cell(BareCopies& copies,
                         const Cell& cell,
                         const std::vector<std::uint32_t>& group_blocks);
  void measure_cells(BenchInstance& instance, cache_manager::CopyStrategy strategy);
  void add(BenchFigure figure) {
    context_.report.figures.push_back(std::move(figure));
    compare_with_link();
  }
  void compare_with_link();

  BenchContext& context_;
  const BenchConfig& config_;
  const BenchShape& shape_;
  const std::size_t first_figure_;
  LinkLimit limit_;
};

std::vector<Cell> TransferBench::cells() const {
  std::vector<Cell> cells;
  for (const Way way : config_.ways) {
    for (const std::uint32_t blocks : config_.blocks) {
      for (const Locality locality : config_.localities) cells.push_back({blocks, locality, way});
    }
  }
  return cells;
}

std::array<std::vector<Traffic::Job>, 2> TransferBench::traffic_of(
    const Cell& cell, const std::vector<std::uint32_t>& group_blocks) const {
  const JobPlan jobs = jobs_of(cell.blocks);
  return {job_blocks(shape_, jobs, cell.locality, 0, group_blocks),
          job_blocks(shape_, jobs, cell.locality, 1, group_blocks)};
}

InstancePlan TransferBench::plan_for(cache_manager::CopyStrategy strategy) {
  std::vector<JobPlan> jobs;
  for (const std::uint32_t blocks : config_.blocks) jobs.push_back(jobs_of(blocks));
  const std::uint32_t gpu_blocks = must(gpu_blocks_for(shape_, jobs));
  return context_.plan(shape_, gpu_blocks,
                       gpu_blocks * shape_.moved_bytes() * kHostRoom + kSlabSlackBytes, strategy);
}

std::vector<cache_manager::CopyStrategy> TransferBench::strategies_for(
    const ipc::ArenaOptions& arena) const {
  using cache_manager::CopyStrategy;
  if (!config_.strategies.empty()) {
    for (const CopyStrategy strategy : config_.strategies) {
      must(check_strategy(strategy, shape_.geometry, arena));
    }
    return config_.strategies;
  }
  std::vector<CopyStrategy> possible;
  for (const CopyStrategy strategy :
       {CopyStrategy::kAuto, CopyStrategy::kDirect, CopyStrategy::kStaged, CopyStrategy::kStrided,
        CopyStrategy::kBatch, CopyStrategy::kMemcpy, CopyStrategy::kKernel, CopyStrategy::kAgent}) {
    // There direct by another name: a block is one copy.
    if (strategy == CopyStrategy::kStrided && arena.order == ipc::ArenaOrder::kBlockFirst) continue;
    if (check_strategy(strategy, shape_.geometry, arena)) possible.push_back(strategy);
  }
  return possible;
}

// The link is one device's, the figures are of all ranks.
void TransferBench::compare_with_link() {
  if (!context_.has_one_device()) return;
  auto& figures = context_.report.figures;
  for (std::size_t i = first_figure_; i < figures.size(); ++i) {
    BenchFigure& figure = figures[i];
    const Samples& limit = limit_.of(figure.point.way);
    if (!figure.gbps.empty()) figure.share = figure.gbps.median() / limit.median();
  }
}

void TransferBench::measure_bare_cell(BareCopies& copies,
                                      const Cell& cell,
                                      const std::vector<std::uint32_t>& group_blocks) {
  const BareCopies::Jobs jobs = traffic_of(cell, group_blocks);
  BenchFigure figure;
  figure.path = BenchPath::kBare;
  figure.point = shape_.point(cell.blocks, cell.way, cell.locality);
  figure.point.block_bytes = shape_.rank_bytes();  // of one rank: bare calls know no others
  // On a simulated device all of them are the same memcpy.
  const std::size_t strategies = context_.cuda() ? kBareStrategies.size() : 1;
  if (context_.wants(BenchKind::kTransfer)) {
    for (std::size_t s = 0; s < strategies; ++s) {
      BenchFigure moved = figure;
      moved.bench = to_string(BenchKind::kTransfer);
      moved.strategy = to_string(kBareStrategies.at(s));
      must(copies.move(kBareStrategies.at(s), cell.way, jobs, config_.bytes));  // warms up
      for (std::uint32_t i = 0; i < config_.repeats; ++i) {
        moved.gbps.add(must(copies.move(kBareStrategies.at(s), cell.way, jobs, config_.bytes)));
      }
      add(std::move(moved));
      context_.check_interrupted();
    }
  }
  if (!context_.wants(BenchKind::kLatency)) return;
  figure.bench = to_string(BenchKind::kLatency);
  const auto add_times = [&](std::string_view strategy, auto measure) {
    BenchFigure timed = figure;
    timed.strategy = strategy;
    must(measure(0));  // warms up
    for (std::uint32_t i = 0; i < config_.samples; ++i) timed.us.add(must(measure(i)));
    add(std::move(timed));
    context_.check_interrupted();
  };
  add_times("one copy", [&](std::uint32_t) {
    return copies.one_copy(cell.way, cell.blocks * shape_.rank_bytes());
  });
  for (std::size_t s = 0; s < strategies; ++s) {
    add_times(to_string(kBareStrategies.at(s)), [&](std::uint32_t i) {
      return copies.one_job(kBareStrategies.at(s), cell.way, jobs[0].at(i % jobs[0].size()));
    });
  }
}

void TransferBench::with_bare_copies(
    const InstancePlan& plan,
    std::uint32_t most_blocks,
    const std::function<void(BareCopies&, const ipc::ArenaLayout&)>& measure) {
  const ipc::ArenaLayout layout = must(ipc::plan_arena(shape_.geometry, plan.arena));
  const auto device = context_.bare_device(shape_, plan);
  BareCopies copies(*device, shape_, layout, most_blocks);
  measure(copies, layout);
}

void TransferBench::measure_link(BareCopies& copies) {
  context_.doing(fmt::format("{}: the link", shape_.geometry.name));
  cli::measure_link(context_, copies, limit_);
  compare_with_link();
}

void TransferBench::measure_bare(const InstancePlan& plan) {
  std::uint32_t most_blocks = 0;
  if (config_.bare) {
    for (const std::uint32_t blocks : config_.blocks) most_blocks = std::max(most_blocks, blocks);
  }
  with_bare_copies(plan, most_blocks, [this](BareCopies& copies, const ipc::ArenaLayout& layout) {
    measure_link(copies);
    if (!config_.bare) return;
    std::vector<std::uint32_t> group_blocks;
    for (const ipc::GroupLayout& group : layout.groups) group_blocks.push_back(group.block_count);
    for (const Cell& cell : cells()) {
      context_.doing(fmt::format("{}: bare copies, {}, blocks of a job: {}", shape_.geometry.name,
                                 to_string(cell.way), cell.blocks));
      measure_bare_cell(copies, cell, group_blocks);
    }
  });
}

void TransferBench::measure_cells(BenchInstance& instance, cache_manager::CopyStrategy strategy) {
  const std::vector<std::uint32_t> group_blocks = instance.client().state().group_blocks;
  for (const Cell& cell : cells()) {
    context_.doing(fmt::format("{}: {}, {}, blocks of a job: {}", shape_.geometry.name,
                               cache_manager::to_string(strategy), to_string(cell.way),
                               cell.blocks));
    Traffic traffic(instance, traffic_of(cell, group_blocks), jobs_of(cell.blocks).in_flight,
                    cell.blocks * shape_.moved_bytes());
    must(traffic.prepare());
    BenchFigure figure;
    figure.strategy = cache_manager::to_string(strategy);
    figure.point = shape_.point(cell.blocks, cell.way, cell.locality);
    if (context_.wants(BenchKind::kTransfer)) {
      BenchFigure moved = figure;
      moved.bench = to_string(BenchKind::kTransfer);
      double cpu_seconds = 0;
      double gib = 0;
      must(traffic.move(cell.way, config_.bytes));  // warms up
      for (std::uint32_t i = 0; i < config_.repeats; ++i) {
        const Traffic::Moved one = must(traffic.move(cell.way, config_.bytes));
        moved.gbps.add(static_cast<double>(one.bytes) / one.seconds / 1e9);
        cpu_seconds += one.cpu_seconds;
        gib += static_cast<double>(one.bytes) / kBytesPerGiB;
      }
      moved.cpu_ms_per_gib = cpu_seconds * 1000 / gib;
      add(std::move(moved));
    }
    if (context_.wants(BenchKind::kLatency)) {
      figure.bench = to_string(BenchKind::kLatency);
      must(traffic.one_job(cell.way, 0));  // warms up
      for (std::uint32_t i = 0; i < config_.samples; ++i) {
        figure.us.add(must(traffic.one_job(cell.way, i)));
      }
      add(std::move(figure));
    }
    must(traffic.finish());
  }
}

void TransferBench::run() {
  const InstancePlan first = plan_for(cache_manager::CopyStrategy::kAuto);
  const auto strategies = strategies_for(first.arena);
  measure_bare(first);
  for (const cache_manager::CopyStrategy strategy : strategies) {
    context_.with_instance(shape_, plan_for(strategy), [this, strategy](BenchInstance& instance) {
      measure_cells(instance, strategy);
    });
    with_bare_copies(first, 0, [this](BareCopies& copies, const ipc::ArenaLayout& /*layout*/) {
      measure_link(copies);
    });
  }
}

}  // namespace

void bench_transfers(BenchContext& context, const BenchShape& shape) {
  TransferBench(context, shape).run();
}

}  // namespace kvferry::cli
