// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/pool_swaps.hpp"

#include "kvferry/ipc/base/check.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "must.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;

constexpr std::uint64_t kFirstSwapped = 1ULL << 30;
/// Of one swap: some blocks, which a few of the link's milliseconds carry at most.
constexpr std::uint64_t kCudaSwapBytes = 16ULL << 20;
constexpr std::uint64_t kHostSwapBytes = 256ULL << 10;
/// Between two looks whether there is room.
constexpr ipc::Duration kRoomLook = 1ms;

enum PoolRow : std::size_t {
  kAccepted,
  kFirstOut,
  kSwapFirst,
  kLongestFirst,
  kSwapRest,
  kLongestRest,
  kSwapThere,
  kLongestThere,
  kRoomAwaited,
  kPoolRows
};
constexpr std::array<std::string_view, kPoolRows> kRowNames = {
    "jobs accepted",           "first GiB swapped out",   "swap, first GiB",
    "longest swap, first GiB", "swap, the rest",          "longest swap, the rest",
    "swap, all there",         "longest swap, all there", "room awaited"};

double us_from(ipc::TimePoint start, ipc::TimePoint end) {
  return std::chrono::duration<double, std::micro>(end - start).count();
}

/// Swaps of new sequences, each into host memory that was none's so far.
class PoolSwaps {
 public:
  PoolSwaps(BenchContext& context,
            BenchInstance& instance,
            std::vector<std::vector<worker::SequenceItem>> jobs)
      : context_(context), instance_(instance), jobs_(std::move(jobs)) {}

  /// Until the pool has no room for another one.
  [[nodiscard]] std::vector<TimedSwap> fill() {
    std::vector<TimedSwap> swaps;
    while (const auto swap = swap_out(swaps.size())) {
      swaps.push_back(*swap);
      context_.check_interrupted();
    }
    return swaps;
  }
  void drop(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) must(instance_.drop(handle_of(i)));
  }

 private:
  [[nodiscard]] static std::uint64_t handle_of(std::size_t swap) noexcept { return swap + 1; }

  /// Nothing: the pool is full.
  std::optional<TimedSwap> swap_out(std::size_t swap) {
    TimedSwap timed;
    const ipc::Deadline room = ipc::Deadline::after(context_.config().patience);
    for (;;) {
      timed.submitted = ipc::MonotonicClock::now();
      if (timed.tried == ipc::TimePoint()) timed.tried = timed.submitted;
      const auto error = run_swap(swap, timed);
      if (!error) return timed;
      if (error->code == ipc::ErrorCode::kNoHostMemory) return std::nullopt;
      if (error->code != ipc::ErrorCode::kBusy || room.expired()) throw ipc::Exception(*error);
      must(instance_.run_for(ipc::Deadline::after(kRoomLook)));
    }
  }
  std::optional<ipc::Error> run_swap(std::size_t swap, TimedSwap& timed) {
    const auto job = instance_.submit(handle_of(swap), jobs_[swap % jobs_.size()], true);
    if (!job) return job.error();
    std::optional<BenchTarget::Ended> mine;
    must(instance_.run_until(
        [&] {
          instance_.take([&](const BenchTarget::Ended& ended) {
            if (ended.job == *job) mine = ended;
          });
          return mine.has_value();
        },
        "a swap into a young pool"));
    timed.ended = ipc::MonotonicClock::now();
    timed.bytes = mine->bytes;
    return mine->error;
  }

  BenchContext& context_;
  BenchInstance& instance_;
  const std::vector<std::vector<worker::SequenceItem>> jobs_;
};

void add_swaps(const Samples& swaps, BenchFigure& each, BenchFigure& longest) {
  if (swaps.empty()) return;
  each.us.add_all(swaps);
  longest.us.add(swaps.most());
}

}  // namespace

PoolTimes pool_times_of(const std::vector<TimedSwap>& swaps,
                        ipc::TimePoint manager_start,
                        std::uint64_t first_bytes) {
  KVFERRY_CHECK(!swaps.empty(), "times of no swap");
  PoolTimes times;
  std::uint64_t bytes = 0;
  for (const TimedSwap& swap : swaps) {
    const bool is_first = bytes < first_bytes;
    (is_first ? times.first : times.rest).add(us_from(swap.submitted, swap.ended));
    if (is_first) times.first_us = us_from(manager_start, swap.ended);
    times.awaited_us += us_from(swap.tried, swap.submitted);
    bytes += swap.bytes;
  }
  return times;
}

void bench_pool_swaps(BenchContext& context, const BenchShape& shape) {
  const BenchConfig& config = context.config();
  const std::uint64_t swap_bytes = context.cuda() ? kCudaSwapBytes : kHostSwapBytes;
  const auto blocks = static_cast<std::uint32_t>(
      std::max<std::uint64_t>(1, swap_bytes / std::max<std::uint64_t>(1, shape.moved_bytes())));
  // Device blocks are swapped out again and again: it is the host memory that is new each time.
  const JobPlan jobs = plan_jobs(shape, blocks, swap_bytes);
  const std::uint32_t gpu_blocks = must(gpu_blocks_for(shape, {jobs}));
  std::array<BenchFigure, kPoolRows> figures;
  for (std::size_t row = 0; row < kPoolRows; ++row) {
    figures.at(row).bench = to_string(BenchKind::kPool);
    figures.at(row).strategy = kRowNames.at(row);
    figures.at(row).point = shape.point(blocks, Way::kToHost, Locality::kRandom);
    figures.at(row).pool_bytes = config.pool_bytes;
  }
  for (std::uint32_t i = 0; i < config.repeats; ++i) {
    const InstancePlan plan =
        context.plan(shape, gpu_blocks, config.pool_bytes, cache_manager::CopyStrategy::kAuto);
    context.with_young_instance(shape, plan, [&](BenchInstance& instance) {
      const ipc::TimePoint accepted = ipc::MonotonicClock::now();
      context.doing(
          fmt::format("{}: a young pool, {} of {}", shape.geometry.name, i + 1, config.repeats));
      PoolSwaps swaps(
          context, instance,
          job_blocks(shape, jobs, Locality::kRandom, 0, instance.client().state().group_blocks));
      const std::vector<TimedSwap> young = swaps.fill();
      if (young.empty()) {
        throw ipc::Exception(KVFERRY_ERROR(
            kNoHostMemory, "a pool of {} has no room for one swap of {}: give more --pool-size",
            ipc::format_size(config.pool_bytes), ipc::format_size(blocks * shape.moved_bytes())));
      }
      const PoolTimes times =
          pool_times_of(young, instance.started_at(), std::min(kFirstSwapped, config.pool_bytes));
      figures[kAccepted].us.add(us_from(instance.started_at(), accepted));
      figures[kFirstOut].us.add(times.first_us);
      add_swaps(times.first, figures[kSwapFirst], figures[kLongestFirst]);
      add_swaps(times.rest, figures[kSwapRest], figures[kLongestRest]);
      figures[kRoomAwaited].us.add(times.awaited_us);
      swaps.drop(young.size());
      const std::vector<TimedSwap> again = swaps.fill();
      if (again.empty()) return;
      // All of them: nothing is to come any more.
      const PoolTimes there = pool_times_of(again, instance.started_at(), 0);
      add_swaps(there.rest, figures[kSwapThere], figures[kLongestThere]);
    });
  }
  for (BenchFigure& figure : figures) {
    if (!figure.us.empty()) context.report.figures.push_back(std::move(figure));
  }
}

}  // namespace kvferry::cli
