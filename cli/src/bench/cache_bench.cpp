// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/cache_bench.hpp"

#include "bench/index_fill.hpp"
#include "must.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <unordered_map>
#include <vector>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""s;

constexpr cache_manager::CopyStrategy kAuto = cache_manager::CopyStrategy::kAuto;
constexpr std::uint32_t kPrefixBlocks = IndexFill::kPrefixBlocks;
constexpr std::uint64_t kSmallestChunk = 64;
constexpr std::uint64_t kSlackBytes = 64ULL << 20;
constexpr std::uint64_t kOrderSeed = 1;
/// Within them an interruption waits, too.
constexpr ipc::Duration kAnswer = IndexFill::kAnswer;
constexpr ipc::Duration kCacheAnswer = 20s;
constexpr std::size_t kAtATime = 256;
/// Looks between two that are measured.
constexpr int kOthersBetween = 50;

BenchFigure figure_of(BenchKind kind, std::string strategy, BenchPoint point) {
  BenchFigure figure;
  figure.bench = to_string(kind);
  figure.strategy = std::move(strategy);
  figure.point = std::move(point);
  return figure;
}

/// Jobs of one block each, as many under way as there are device blocks.
class SmallJobs {
 public:
  SmallJobs(BenchInstance& instance, std::uint32_t in_flight)
      : instance_(instance), in_flight_(in_flight) {}

  /// Microseconds in the call.
  double submit(std::uint32_t block) {
    const worker::SequenceItem item{ipc::GroupId{0}, ipc::BlockId{block}, 0};
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    const worker::JobId id = must(instance_.client().swap_out(block + 1, {&item, 1}));
    const double us = us_since(start);
    under_way_.emplace(id.value, block);
    return us;
  }
  /// Jobs a second over so many.
  double run(std::uint64_t jobs, Samples& calls) {
    std::uint64_t submitted = 0;
    std::uint64_t ended = 0;
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    for (std::uint32_t block = 0; block < in_flight_ && submitted < jobs; ++block, ++submitted) {
      calls.add(submit(block));
    }
    must(instance_.run_until(
        [&] {
          for (const worker::Completion& completion : instance_.client().poll(kAtATime)) {
            const auto found = under_way_.find(completion.job.value);
            if (found == under_way_.end()) continue;
            must_be_ok(completion);
            const std::uint32_t block = found->second;
            under_way_.erase(found);
            instance_.note_progress();
            ++ended;
            if (submitted >= jobs) continue;
            calls.add(submit(block));
            ++submitted;
          }
          return ended == jobs;
        },
        "small jobs"));
    return static_cast<double>(jobs) / (us_since(start) / 1e6);
  }

 private:
  BenchInstance& instance_;
  const std::uint32_t in_flight_;
  std::unordered_map<std::uint64_t, std::uint32_t> under_way_;
};

/// What a step of an engine spends on beginning a store of so many new blocks: it is offered, or
/// its room is asked for first. Earlier ones give way.
void measure_store_calls(BenchContext& context, BenchInstance& instance, BenchPoint point) {
  const std::uint32_t count = point.blocks;
  worker::Client& client = instance.client();
  std::vector<worker::StoreTarget> targets(count);
  std::vector<worker::StoreItem> items(count);
  BenchFigure offered = figure_of(BenchKind::kSubmit, "store, offered", point);
  BenchFigure reserved = figure_of(BenchKind::kSubmit, "store, reserved first", std::move(point));
  const auto store = [&](std::uint64_t prefix, bool reserves, Samples& calls) {
    for (std::uint32_t i = 0; i < count; ++i) {
      targets[i] = {ipc::GroupId{0}, IndexFill::hash_of(prefix, i),
                    i == 0 ? worker::Digest{} : IndexFill::hash_of(prefix, i - 1)};
      items[i] = {ipc::GroupId{0}, ipc::BlockId{i}, i};
    }
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    if (reserves) {
      const auto slots = must(client.reserve_store(targets, ipc::Deadline::after(kAnswer)));
      for (std::uint32_t i = 0; i < count; ++i) items[i].slot = slots[i].slot;
    }
    const worker::JobId job =
        must(reserves ? client.submit_store(items) : client.offer_store(targets, items));
    calls.add(us_since(start));
    // wait: a store of the bench's own instance; kAnswer; the manager's end, which ends its jobs
    must_be_ok(must(client.wait({&job, 1}, ipc::Deadline::after(kAnswer))).front());
  };
  for (std::uint32_t i = 0; i < context.config().samples; ++i) {
    store(2 * std::uint64_t{i}, false, offered.us);
    store(2 * std::uint64_t{i} + 1, true, reserved.us);
    context.check_interrupted();
  }
  context.report.figures.push_back(std::move(offered));
  context.report.figures.push_back(std::move(reserved));
}

/// Of prefixes in any order, by either way of looking. Between two of them what other prefixes have
/// in the table passes through this processor's caches.
void measure_lookups(BenchContext& context,
                     BenchInstance& instance,
                     std::uint64_t prefixes,
                     const BenchPoint& point) {
  const std::uint64_t entries = prefixes * kPrefixBlocks;
  worker::Client& client = instance.client();
  std::mt19937_64 random(kOrderSeed);
  // What is asked for beyond a prefix's blocks is not there.
  const auto measure = [&](std::string_view how, std::uint32_t asked, auto look) {
    BenchFigure figure =
        figure_of(BenchKind::kLookup, fmt::format("{}, {} entries", how, entries), point);
    for (std::uint32_t i = 0; i < context.config().samples; ++i) {
      for (int other = 0; other < kOthersBetween; ++other) {
        (void)must(
            client.match_prefix(IndexFill::hashes_of(random() % prefixes, 2 * kPrefixBlocks)));
      }
      const std::vector<worker::Digest> hashes = IndexFill::hashes_of(random() % prefixes, asked);
      const ipc::TimePoint start = ipc::MonotonicClock::now();
      const std::uint32_t found = look(hashes);
      figure.us.add(us_since(start));
      if (found != kPrefixBlocks) {
        throw ipc::Exception(KVFERRY_ERROR(kNotFound, "only {} of {} stored blocks were found",
                                           found, kPrefixBlocks));
      }
      context.check_interrupted();
    }
    context.report.figures.push_back(std::move(figure));
  };
  measure("prefix, in the table", kPrefixBlocks,
          [&](const auto& hashes) { return must(client.match_prefix(hashes)).usable; });
  measure("half a prefix, in the table", 2 * kPrefixBlocks,
          [&](const auto& hashes) { return must(client.match_prefix(hashes)).usable; });
  measure("each block, in the table", kPrefixBlocks, [&](const auto& hashes) {
    return static_cast<std::uint32_t>(
        std::count_if(hashes.begin(), hashes.end(), [&](const worker::Digest& hash) {
          return client.presence(ipc::GroupId{0}, hash) == worker::Presence::kHit;
        }));
  });
  measure("by a message", kPrefixBlocks, [&](const auto& hashes) {
    return must(client.lookup(hashes, ipc::Deadline::after(kAnswer))).usable_prefix;
  });
}

/// The bare calls for memory of an arena's size, in this process.
void measure_bare_memory(BenchContext& context,
                         const BenchShape& shape,
                         const InstancePlan& plan,
                         const BenchPoint& point) {
  const std::uint64_t bytes = must(ipc::plan_arena(shape.geometry, plan.arena)).total_bytes();
  const auto device = context.bare_device(shape, plan);
  BenchFigure freed = figure_of(BenchKind::kClear, "free", point);
  BenchFigure allocated = figure_of(BenchKind::kClear, "allocate", point);
  freed.path = allocated.path = BenchPath::kBare;
  for (std::uint32_t i = 0; i < context.config().repeats; ++i) {
    ipc::TimePoint start = ipc::MonotonicClock::now();
    const auto memory = must(device->allocate(bytes, context.config().arena.handles, nullptr));
    allocated.us.add(us_since(start));
    start = ipc::MonotonicClock::now();
    must(memory->release());
    freed.us.add(us_since(start));
  }
  context.report.figures.push_back(std::move(freed));
  context.report.figures.push_back(std::move(allocated));
}

}  // namespace

void bench_submit(BenchContext& context, const BenchShape& shape) {
  constexpr std::uint32_t kInFlight = 64;
  constexpr std::uint64_t kWarmUpJobs = 256;
  constexpr std::uint64_t kJobsOfSample = 40;
  constexpr std::uint32_t kStoredAtOnce = 16;
  const InstancePlan plan =
      context.plan(shape, kInFlight * 2, kWarmUpJobs * shape.moved_bytes() + kSlackBytes, kAuto);
  context.with_instance(shape, plan, [&](BenchInstance& instance) {
    context.doing("submit: jobs of one block");
    BenchFigure figure =
        figure_of(BenchKind::kSubmit, "auto", shape.point(1, Way::kToHost, Locality::kSequential));
    SmallJobs jobs(instance, kInFlight);
    Samples warm_up;
    jobs.run(kWarmUpJobs, warm_up);
    figure.per_second = jobs.run(context.config().samples * kJobsOfSample, figure.us);
    context.report.figures.push_back(std::move(figure));
    context.doing("submit: stores");
    measure_store_calls(context, instance,
                        shape.point(kStoredAtOnce, Way::kToHost, Locality::kSequential));
  });
}

void bench_lookup(BenchContext& context) {
  const BenchConfig& config = context.config();
  const BenchShape shape =
      must(make_even_shape(kSmallestChunk, 1, config.ranks, context.dir().path()));
  const std::uint64_t prefixes = std::max<std::uint64_t>(1, config.entries / kPrefixBlocks);
  const std::uint64_t entries = prefixes * kPrefixBlocks;
  const InstancePlan plan = context.plan(shape, IndexFill::kStoreBlocks,
                                         entries * shape.moved_bytes() * 2 + kSlackBytes, kAuto);
  context.with_instance(shape, plan, [&](BenchInstance& instance) {
    IndexFill(context, instance, prefixes, Locality::kRandom).run("lookup");
    context.doing("lookup: prefixes of 1,000 blocks");
    measure_lookups(context, instance, prefixes,
                    shape.point(kPrefixBlocks, Way::kToDevice, Locality::kRandom));
  });
}

void bench_clear(BenchContext& context, const BenchShape& shape) {
  const std::uint64_t blocks = std::clamp<std::uint64_t>(
      context.config().pool_bytes / shape.rank_bytes(), 1, ipc::kMaxDeviceBlocks);
  const auto gpu_blocks = static_cast<std::uint32_t>(blocks);
  const InstancePlan plan =
      context.plan(shape, gpu_blocks, shape.moved_bytes() * 16 + kSlackBytes, kAuto);
  const BenchPoint point = shape.point(gpu_blocks, Way::kToHost, Locality::kSequential);
  context.doing("clear: bare memory");
  measure_bare_memory(context, shape, plan, point);
  context.with_instance(shape, plan, [&](BenchInstance& instance) {
    context.doing("clear: an idle arena");
    BenchFigure cleared = figure_of(BenchKind::kClear, "clear", point);
    BenchFigure taken = figure_of(BenchKind::kClear, "reinit", point);
    for (std::uint32_t i = 0; i < context.config().repeats; ++i) {
      ipc::TimePoint start = ipc::MonotonicClock::now();
      must(instance.client().clear(worker::HostPolicy::kKeep, ipc::Deadline::after(kCacheAnswer)));
      cleared.us.add(us_since(start));
      start = ipc::MonotonicClock::now();
      must(instance.client().reinit(0, ipc::Deadline::after(kCacheAnswer)));
      taken.us.add(us_since(start));
      context.check_interrupted();
    }
    context.report.figures.push_back(std::move(cleared));
    context.report.figures.push_back(std::move(taken));
  });
}

}  // namespace kvferry::cli
