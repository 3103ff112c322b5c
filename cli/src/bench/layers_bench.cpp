// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/layers_bench.hpp"

#include "bench/bench_steps.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "must.hpp"

#include <fmt/format.h>

#include <array>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

using ipc::LayerTicket;

constexpr std::uint64_t kRoom = 2;  ///< Of host memory, as a multiple of what is stored.
constexpr std::uint64_t kSlabSlack = 256ULL << 20;
constexpr std::uint32_t kLoadSlot = 0;
constexpr std::uint32_t kStoreSlot = 1;
constexpr std::size_t kTaken = 64;
constexpr ipc::Duration kAwakeFor = std::chrono::milliseconds(5);
constexpr ipc::Duration kCallTime = std::chrono::seconds(30);

/// One instance and jobs of so many blocks: those stored lie at the start of the arena, loads go to
/// the blocks behind them.
class LayersRun {
 public:
  LayersRun(BenchContext& context,
            const BenchShape& shape,
            BenchInstance& instance,
            const InstancePlan& plan,
            std::uint32_t blocks)
      : context_(context),
        shape_(shape),
        instance_(instance),
        blocks_(blocks),
        groups_(static_cast<std::uint32_t>(shape.geometry.groups.size())) {
    steps_.emplace(instance, instance.client(),
                   must(ipc::RuntimeDir::open(context.dir().path().string(), plan.instance)),
                   plan.engine, shape.geometry.ranks);
  }

  void fill() {
    ipc::Step step = new_step();
    step.fills = seeded(0);
    run(step);
  }
  void store() { await_job(submit_store(std::nullopt)); }

  /// Microseconds of a load that is computed on layer by layer, the first of them or all, from its
  /// submit to the step's answer.
  double load_with_step(std::uint32_t layers) {
    const LayerTicket ticket{kLoadSlot, ++use_};
    ipc::Step step = new_step();
    step.awaits = ticket;
    step.layers = layers;
    step.verifies = seeded(blocks_);
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    instance_.stay_awake(kAwakeFor);
    send(step);
    const worker::JobId job = submit_load(ticket);
    await_steps();
    const double us = us_since(start);
    await_job(job);
    return us;
  }
  /// The same compute on what is there already.
  double step_alone(std::uint32_t layers) {
    const LayerTicket ticket{kLoadSlot, ++use_};
    await_job(submit_load(ticket));
    ipc::Step step = new_step();
    step.awaits = ticket;
    step.layers = layers;
    step.verifies = seeded(blocks_);
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    instance_.stay_awake(kAwakeFor);
    run(step);
    return us_since(start);
  }
  double load_alone() {
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    instance_.stay_awake(kAwakeFor);
    await_job(submit_load(std::nullopt));
    return us_since(start);
  }
  double load_then_step() {
    const double load = load_alone();
    ipc::Step step = new_step();
    step.verifies = seeded(blocks_);
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    instance_.stay_awake(kAwakeFor);
    run(step);
    return load + us_since(start);
  }
  /// Of a step that writes the blocks and a store of them, until the store is complete.
  double step_with_store() {
    const LayerTicket ticket{kStoreSlot, ++use_};
    ipc::Step step = new_step();
    step.computes = ticket;
    step.fills = seeded(0);
    const auto slots = reserve();
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    instance_.stay_awake(kAwakeFor);
    send(step);
    const worker::JobId job = submit_store(slots, ticket);
    await_steps();
    await_job(job);
    return us_since(start);
  }
  double step_then_store() {
    ipc::Step step = new_step();
    step.fills = seeded(0);
    const auto slots = reserve();
    const ipc::TimePoint start = ipc::MonotonicClock::now();
    instance_.stay_awake(kAwakeFor);
    run(step);
    await_job(submit_store(slots, std::nullopt));
    return us_since(start);
  }

 private:
  using Slots = std::vector<worker::StoreSlot>;

  void await(std::string_view what, const std::function<bool()>& done) {
    must(instance_.run_until(done, what));
    if (steps_->failed()) throw ipc::Exception(*steps_->failed());
    if (failed_) throw ipc::Exception(*failed_);
    context_.check_interrupted();
  }
  [[nodiscard]] ipc::Step new_step() const {
    ipc::Step step;
    step.patience =
        std::chrono::duration_cast<std::chrono::milliseconds>(context_.config().patience);
    return step;
  }
  [[nodiscard]] std::vector<ipc::SeededItem> seeded(std::uint32_t first) const {
    std::vector<ipc::SeededItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < blocks_; ++i) {
        items.push_back({ipc::GroupId{group}, ipc::BlockId{first + i}, 1000 * group + i});
      }
    }
    return items;
  }

  void send(const ipc::Step& step) { steps_->send(step); }
  void await_steps() {
    await("a step", [this] { return steps_->is_done(); });
  }
  void run(const ipc::Step& step) {
    send(step);
    await_steps();
  }

  /// Of keys that nobody has stored.
  [[nodiscard]] Slots reserve() {
    ++prompt_;
    std::vector<worker::StoreTarget> targets;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < blocks_; ++i) targets.push_back({ipc::GroupId{group}, key(i)});
    }
    return must(instance_.client().reserve_store(targets, ipc::Deadline::after(kCallTime)));
  }
  [[nodiscard]] ipc::Digest key(std::uint32_t block) const {
    const std::array<std::uint64_t, 2> words{prompt_, block};
    return ipc::chain_block_hash({}, words.data(), sizeof(words));
  }
  worker::JobId submit_store(std::optional<LayerTicket> ticket) {
    return submit_store(reserve(), ticket);
  }
  worker::JobId submit_store(const Slots& slots, std::optional<LayerTicket> ticket) {
    std::vector<worker::StoreItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < blocks_; ++i) {
        items.push_back({ipc::GroupId{group}, ipc::BlockId{i}, slots.at(items.size()).slot});
      }
    }
    return must(instance_.client().submit_store(items, ticket));
  }
  worker::JobId submit_load(std::optional<LayerTicket> ticket) {
    std::vector<worker::LoadItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < blocks_; ++i) {
        items.push_back({ipc::GroupId{group}, ipc::BlockId{blocks_ + i}, key(i)});
      }
    }
    return must(instance_.client().submit_load(items, ipc::Urgency::kOrdinary, ticket));
  }
  void await_job(worker::JobId job) {
    bool done = false;
    await("a job", [&] {
      for (const worker::Completion& completion : instance_.client().poll(kTaken)) {
        instance_.note_progress();
        if (!completion.all_ok() && !failed_) {
          failed_ = KVFERRY_ERROR(kSystem, "a job failed: {}", completion.message);
        }
        done |= completion.job == job;
      }
      return done || failed_.has_value();
    });
  }

  BenchContext& context_;
  const BenchShape& shape_;
  BenchInstance& instance_;
  const std::uint32_t blocks_;
  const std::uint32_t groups_;
  std::optional<BenchSteps> steps_;
  std::uint64_t use_ = 0;
  std::uint64_t prompt_ = 0;
  std::optional<ipc::Error> failed_;
};

}  // namespace

void bench_layers(BenchContext& context, const BenchShape& shape) {
  const BenchConfig& config = context.config();
  std::vector<cache_manager::CopyStrategy> strategies = config.strategies;
  if (strategies.empty()) strategies.push_back(cache_manager::CopyStrategy::kAuto);
  for (const cache_manager::CopyStrategy strategy : strategies) {
    for (const std::uint32_t blocks : config.blocks) {
      // Each store of a sample takes host memory of its own; the oldest are evicted.
      const std::uint64_t host_bytes = blocks * shape.moved_bytes() * 3 * kRoom + kSlabSlack;
      const InstancePlan plan = context.plan(shape, 2 * blocks + 1, host_bytes, strategy);
      context.with_instance(shape, plan, [&](BenchInstance& instance) {
        context.doing(fmt::format("{}: layers, {}, blocks of a job: {}", shape.geometry.name,
                                  cache_manager::to_string(strategy), blocks));
        LayersRun run(context, shape, instance, plan, blocks);
        run.fill();
        run.store();
        const auto measure = [&](Way way, std::string_view what,
                                 const std::function<double()>& one) {
          BenchFigure figure;
          figure.bench = to_string(BenchKind::kLayers);
          figure.strategy = fmt::format("{}: {}", cache_manager::to_string(strategy), what);
          figure.point = shape.point(blocks, way, Locality::kSequential);
          (void)one();  // warms up
          for (std::uint32_t i = 0; i < config.samples; ++i) figure.us.add(one());
          context.report.figures.push_back(std::move(figure));
        };
        measure(Way::kToDevice, "load", [&] { return run.load_alone(); });
        measure(Way::kToDevice, "load, then compute", [&] { return run.load_then_step(); });
        measure(Way::kToDevice, "compute as layers come", [&] { return run.load_with_step(0); });
        measure(Way::kToDevice, "first layer usable",
                [&] { return run.load_with_step(1) - run.step_alone(1); });
        measure(Way::kToHost, "compute, then store", [&] { return run.step_then_store(); });
        measure(Way::kToHost, "store as layers are written", [&] { return run.step_with_store(); });
      });
    }
  }
}

}  // namespace kvferry::cli
