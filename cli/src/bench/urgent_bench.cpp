// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/urgent_bench.hpp"

#include "must.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""us;

/// Of host memory, as a multiple of what is stored.
constexpr std::uint64_t kStoredRoom = 2;
constexpr std::uint64_t kPoolRest = 64ULL << 20;
constexpr std::size_t kTakenAtOnce = 64;
/// Loads under way that an urgent one is to overtake: one that copies, and those after it.
constexpr std::size_t kUnderWay = 3;
constexpr std::uint8_t kUrgent = 200;
constexpr ipc::Duration kLookFor = std::chrono::milliseconds(5);
constexpr ipc::Duration kSlotsTime = std::chrono::seconds(30);

/// One instance. Blocks of a job are stored once; loads go to as many blocks behind those, one set
/// for each that is under way, and the urgent one's to the last.
class UrgentRun {
 public:
  UrgentRun(BenchContext& context,
            const BenchShape& shape,
            BenchInstance& instance,
            std::uint32_t blocks)
      : context_(context),
        instance_(instance),
        blocks_(blocks),
        groups_(static_cast<std::uint32_t>(shape.geometry.groups.size())) {}

  /// Of the arena.
  [[nodiscard]] static std::uint32_t blocks_for(std::uint32_t blocks) {
    return (1 + static_cast<std::uint32_t>(kUnderWay)) * blocks + 1;
  }

  void store() {
    std::vector<worker::StoreTarget> targets;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < blocks_; ++i) targets.push_back({ipc::GroupId{group}, key(i)});
    }
    const auto slots =
        must(instance_.client().reserve_store(targets, ipc::Deadline::after(kSlotsTime)));
    std::vector<worker::StoreItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < blocks_; ++i) {
        items.push_back({ipc::GroupId{group}, ipc::BlockId{i}, slots.at(items.size()).slot});
      }
    }
    const worker::JobId job = must(instance_.client().submit_store(items));
    await("a store", [this, job] { return take(job); });
  }

  /// Microseconds of an urgent load.
  double urgent() {
    std::vector<worker::LoadItem> items;
    const std::uint32_t last = blocks_for(blocks_) - 1;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      items.push_back({ipc::GroupId{group}, ipc::BlockId{last}, key(0)});
    }
    instance_.stay_awake(kLookFor);
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    const worker::JobId job = must(instance_.client().submit_load(items, kUrgent));
    await("an urgent load", [this, job] { return take(job); });
    return us_since(start);
  }
  /// The same behind others, at any time of their copies.
  double urgent_behind(std::uint8_t priority, std::uint32_t turn) {
    priority_ = priority;
    keeps_busy_ = true;
    top_up();
    const std::uint64_t ended = ended_;
    await("loads under way", [this, ended] {
      (void)take(std::nullopt);
      return ended_ > ended;
    });
    // Not always right after one has ended.
    constexpr std::uint32_t kPlaces = 16;
    instance_.stay_awake(kLookFor);
    must(instance_.run_for(ipc::Deadline::after(30us * (turn % kPlaces))));
    (void)take(std::nullopt);
    return urgent();
  }
  /// Lets what is under way end.
  void rest() {
    keeps_busy_ = false;
    await("the last loads", [this] {
      (void)take(std::nullopt);
      return std::none_of(under_way_.begin(), under_way_.end(),
                          [](const auto& job) { return job.has_value(); });
    });
  }

 private:
  void await(std::string_view what, const std::function<bool()>& done) {
    must(instance_.run_until(done, what));
    context_.check_interrupted();
  }
  [[nodiscard]] static ipc::Digest key(std::uint32_t block) {
    const std::array<std::uint64_t, 1> words{block};
    return ipc::chain_block_hash({}, words.data(), sizeof(words));
  }
  void top_up() {
    for (std::size_t i = 0; keeps_busy_ && i < under_way_.size(); ++i) {
      if (!under_way_.at(i)) under_way_.at(i) = submit_blocks(static_cast<std::uint32_t>(i));
    }
  }
  worker::JobId submit_blocks(std::uint32_t set) {
    std::vector<worker::LoadItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < blocks_; ++i) {
        items.push_back({ipc::GroupId{group}, ipc::BlockId{(1 + set) * blocks_ + i}, key(i)});
      }
    }
    return must(instance_.client().submit_load(items, priority_));
  }
  /// True once this one has ended; others are followed by the next.
  bool take(std::optional<worker::JobId> awaited) {
    bool done = false;
    for (const worker::Completion& completion : instance_.client().poll(kTakenAtOnce)) {
      instance_.note_progress();
      if (!completion.all_ok()) {
        throw ipc::Exception(KVFERRY_ERROR(kSystem, "a job failed: {}", completion.message));
      }
      done |= awaited == completion.job;
      auto* const ended = std::find(under_way_.begin(), under_way_.end(), completion.job);
      if (ended == under_way_.end()) continue;
      ended->reset();
      ++ended_;
    }
    top_up();
    return done;
  }

  BenchContext& context_;
  BenchInstance& instance_;
  const std::uint32_t blocks_;
  const std::uint32_t groups_;
  std::array<std::optional<worker::JobId>, kUnderWay> under_way_;
  std::uint64_t ended_ = 0;  ///< Of those.
  bool keeps_busy_ = false;
  std::uint8_t priority_ = ipc::Urgency::kOrdinary;  ///< Of those.
};

}  // namespace

void bench_urgent(BenchContext& context, const BenchShape& shape) {
  const BenchConfig& config = context.config();
  std::vector<cache_manager::CopyStrategy> strategies = config.strategies;
  if (strategies.empty()) strategies.push_back(cache_manager::CopyStrategy::kAuto);
  for (const cache_manager::CopyStrategy strategy : strategies) {
    for (const std::uint32_t blocks : config.blocks) {
      const std::uint64_t host_bytes = blocks * shape.moved_bytes() * kStoredRoom + kPoolRest;
      const InstancePlan plan =
          context.plan(shape, UrgentRun::blocks_for(blocks), host_bytes, strategy);
      context.with_instance(shape, plan, [&](BenchInstance& instance) {
        context.doing(fmt::format("{}: urgent, {}, blocks of a job: {}", shape.geometry.name,
                                  cache_manager::to_string(strategy), blocks));
        UrgentRun run(context, shape, instance, blocks);
        run.store();
        const auto measure = [&](std::string_view what, std::uint32_t job_blocks,
                                 const std::function<double(std::uint32_t)>& one) {
          BenchFigure figure;
          figure.bench = to_string(BenchKind::kUrgent);
          figure.strategy = fmt::format("{}: {}", cache_manager::to_string(strategy), what);
          figure.point = shape.point(job_blocks, Way::kToDevice, Locality::kSequential);
          (void)one(0);  // warms up
          for (std::uint32_t i = 0; i < config.samples; ++i) figure.us.add(one(i));
          context.report.figures.push_back(std::move(figure));
        };
        measure("alone", 1, [&](std::uint32_t) { return run.urgent(); });
        measure("behind loads", blocks, [&](std::uint32_t turn) {
          return run.urgent_behind(ipc::Urgency::kOrdinary, turn);
        });
        run.rest();
        measure("behind loads ahead", blocks,
                [&](std::uint32_t turn) { return run.urgent_behind(ipc::Urgency::kAhead, turn); });
        run.rest();
      });
    }
  }
}

}  // namespace kvferry::cli
