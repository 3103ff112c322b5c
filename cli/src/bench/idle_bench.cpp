// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/idle_bench.hpp"

#include "bench/traffic.hpp"
#include "must.hpp"

#include <fmt/format.h>

#include <map>
#include <string>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;

constexpr std::uint32_t kJobBlocks = 4;
constexpr std::uint64_t kJobsSpan = 16ULL << 20;
constexpr std::uint64_t kHostBytes = 256ULL << 20;
/// What follows traffic has come to rest then: calibration and the pool's registration, too.
constexpr ipc::Duration kRest = 3s;
constexpr ipc::Duration kWindow = 2s;

}  // namespace

void bench_idle(BenchContext& context, const BenchShape& shape) {
  const JobPlan jobs = plan_jobs(shape, kJobBlocks, kJobsSpan);
  const InstancePlan plan = context.plan(shape, must(gpu_blocks_for(shape, {jobs})), kHostBytes,
                                         cache_manager::CopyStrategy::kAuto);
  context.with_instance(shape, plan, [&](BenchInstance& instance) {
    context.doing("idle: traffic before it");
    const std::vector<std::uint32_t> group_blocks = instance.client().state().group_blocks;
    const auto blocks_of = [&](std::uint32_t lane) {
      return job_blocks(shape, jobs, Locality::kRandom, lane, group_blocks);
    };
    Traffic traffic(instance, {blocks_of(0), blocks_of(1)}, jobs.in_flight,
                    kJobBlocks * shape.moved_bytes());
    must(traffic.prepare());
    must(traffic.move(Way::kBoth, kJobsSpan));
    must(traffic.finish());
    must(instance.run_for(ipc::Deadline::after(kRest)));
    std::map<std::string, Samples> shares;
    for (std::uint32_t i = 0; i < context.config().repeats; ++i) {
      context.doing(fmt::format("idle: {} of {}", i + 1, context.config().repeats));
      const auto before = instance.cpu_seconds_each();
      const ipc::TimePoint start = ipc::MonotonicClock::now();
      must(instance.run_for(ipc::Deadline::after(kWindow)));
      const double seconds = us_since(start) / 1e6;
      for (const auto& [name, spent] : instance.cpu_seconds_each()) {
        if (const auto found = before.find(name); found != before.end()) {
          shares[name].add((spent - found->second) / seconds);
        }
      }
      context.check_interrupted();
    }
    for (auto& [name, samples] : shares) {
      BenchFigure figure;
      figure.bench = to_string(BenchKind::kIdle);
      figure.strategy = name;
      figure.point = shape.point(kJobBlocks, Way::kBoth, Locality::kRandom);
      figure.core_share = std::move(samples);
      context.report.figures.push_back(std::move(figure));
    }
  });
}

}  // namespace kvferry::cli
