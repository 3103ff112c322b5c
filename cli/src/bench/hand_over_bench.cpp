// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/hand_over_bench.hpp"

#include "bench/bench_steps.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "must.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace kvferry::cli {
namespace {

constexpr const char* kDecode = "decode";
/// Prompts that host memory has room for; the oldest are evicted.
constexpr std::uint64_t kPromptsStored = 4;
constexpr std::uint64_t kSlabRoom = 64ULL << 20;
constexpr std::size_t kMostTaken = 64;
constexpr ipc::Duration kLookForPieces = std::chrono::milliseconds(5);
/// Blocks of one store, where a prompt has more.
constexpr std::array<std::uint32_t, 2> kPieces = {1, 8};

/// One of the two engines: its client, and what its workers compute.
class HandOverEngine {
 public:
  HandOverEngine(BenchInstance& instance,
                 worker::Client& client,
                 const ipc::RuntimeDir& dir,
                 const std::string& name,
                 const ipc::Geometry& geometry)
      : instance_(instance), client_(client), steps_(instance, client, dir, name, geometry.ranks) {}

  [[nodiscard]] worker::Client& client() noexcept { return client_; }
  void begin(worker::JobId job) { running_.insert(job); }
  [[nodiscard]] bool is_done() {
    for (const worker::Completion& completion : client_.poll(kMostTaken)) {
      instance_.note_progress();
      if (!completion.all_ok() && !failed_) {
        failed_ = KVFERRY_ERROR(kSystem, "a job failed: {}", completion.message);
      }
      running_.erase(completion.job);
    }
    if (failed_) throw ipc::Exception(*failed_);
    return running_.empty();
  }
  /// On all ranks; what a step verifies has to be there.
  void run(const ipc::Step& step) {
    steps_.send(step);
    must(instance_.run_until([this] { return steps_.is_done(); }, "a step"));
    if (steps_.failed()) throw ipc::Exception(*steps_.failed());
  }

 private:
  BenchInstance& instance_;
  worker::Client& client_;
  BenchSteps steps_;
  std::set<worker::JobId> running_;
  std::optional<ipc::Error> failed_;
};

/// Prompts of so many blocks, at the start of both engines' arenas.
class HandOverRun {
 public:
  HandOverRun(BenchContext& context,
              const BenchShape& shape,
              BenchInstance& instance,
              const InstancePlan& plan,
              std::uint32_t blocks)
      : context_(context),
        instance_(instance),
        blocks_(blocks),
        groups_(static_cast<std::uint32_t>(shape.geometry.groups.size())),
        decode_client_(instance.connect(kDecode)) {
    const auto dir = must(ipc::RuntimeDir::open(context.dir().path().string(), plan.instance));
    prefill_.emplace(instance, instance.client(), dir, plan.engine, shape.geometry);
    decode_.emplace(instance, *decode_client_, dir, kDecode, shape.geometry);
    instance_.loop().watch(decode_client_->fd(), [] {});  // it ends a round of the loop
  }
  HandOverRun(const HandOverRun&) = delete;
  HandOverRun& operator=(const HandOverRun&) = delete;
  ~HandOverRun() { instance_.loop().unwatch(decode_client_->fd()); }

  /// Microseconds; the decode asks for a piece when all of the prompt is stored.
  double store_then_load() {
    const ipc::TimePoint start = begin();
    prefill_->begin(store(0, blocks_));
    await("a store", [this] { return prefill_->is_done(); });
    decode_->begin(must(decode_->client().submit_load(items(), ipc::Urgency::kOrdinary)));
    await("a load", [this] { return decode_->is_done(); });
    return us_since(start);
  }
  /// The decode asks before the first block is stored, for all of them.
  double hand_over(std::uint32_t piece) {
    const ipc::TimePoint until = ipc::MonotonicClock::now() + context_.config().patience;
    const ipc::TimePoint start = begin();
    decode_->begin(
        must(decode_->client().submit_load_when_stored(items(), ipc::Urgency::kOrdinary, until)));
    for (std::uint32_t first = 0; first < blocks_; first += piece) {
      prefill_->begin(store(first, std::min(piece, blocks_ - first)));
    }
    await("a hand-over", [this] {
      const bool stored = prefill_->is_done();
      return decode_->is_done() && stored;
    });
    return us_since(start);
  }
  /// The same of contents that the prefill's workers have just computed, and the decode's compare.
  void check(const std::function<double()>& one) {
    prefill_->run(step(true));
    (void)one();
    decode_->run(step(false));
  }

 private:
  ipc::TimePoint begin() {
    ++prompt_;
    instance_.stay_awake(kLookForPieces);
    return ipc::MonotonicClock::now();
  }
  void await(std::string_view what, const std::function<bool()>& done) {
    must(instance_.run_until(done, what));
    context_.check_interrupted();
  }
  [[nodiscard]] ipc::Digest key(std::uint32_t block) const {
    const std::array<std::uint64_t, 2> words{prompt_, block};
    return ipc::chain_block_hash({}, words.data(), sizeof(words));
  }
  [[nodiscard]] ipc::Step step(bool fills) const {
    ipc::Step step;
    step.patience =
        std::chrono::duration_cast<std::chrono::milliseconds>(context_.config().patience);
    auto& seeded = fills ? step.fills : step.verifies;
    // Before what is handed over next gets its number, and after.
    const std::uint64_t prompt = fills ? prompt_ + 1 : prompt_;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < blocks_; ++i) {
        seeded.push_back({ipc::GroupId{group}, ipc::BlockId{i},
                          (prompt << 32U) + (std::uint64_t{group} << 24U) + i});
      }
    }
    return step;
  }
  worker::JobId store(std::uint32_t first, std::uint32_t count) {
    std::vector<worker::StoreTarget> targets;
    std::vector<worker::StoreItem> sources;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = first; i < first + count; ++i) {
        sources.push_back({ipc::GroupId{group}, ipc::BlockId{i}, targets.size()});
        targets.push_back({ipc::GroupId{group}, key(i), i == 0 ? ipc::Digest{} : key(i - 1)});
      }
    }
    return must(prefill_->client().offer_store(targets, sources));
  }
  [[nodiscard]] std::vector<worker::LoadItem> items() const {
    std::vector<worker::LoadItem> items;
    for (std::uint32_t group = 0; group < groups_; ++group) {
      for (std::uint32_t i = 0; i < blocks_; ++i) {
        items.push_back({ipc::GroupId{group}, ipc::BlockId{i}, key(i)});
      }
    }
    return items;
  }

  BenchContext& context_;
  BenchInstance& instance_;
  const std::uint32_t blocks_;
  const std::uint32_t groups_;
  std::unique_ptr<worker::Client> decode_client_;
  std::optional<HandOverEngine> prefill_;
  std::optional<HandOverEngine> decode_;
  std::uint64_t prompt_ = 0;
};

}  // namespace

void bench_hand_over(BenchContext& context, const BenchShape& shape) {
  const BenchConfig& config = context.config();
  std::vector<cache_manager::CopyStrategy> strategies = config.strategies;
  if (strategies.empty()) strategies.push_back(cache_manager::CopyStrategy::kAuto);
  for (const cache_manager::CopyStrategy strategy : strategies) {
    for (const std::uint32_t blocks : config.blocks) {
      const std::uint64_t host_bytes = blocks * shape.moved_bytes() * kPromptsStored + kSlabRoom;
      InstancePlan plan = context.plan(shape, blocks + 1, host_bytes, strategy);
      context.add_engine(shape, kDecode, plan);
      context.with_instance(shape, plan, [&](BenchInstance& instance) {
        context.doing(fmt::format("{}: handover, {}, blocks of a prompt: {}", shape.geometry.name,
                                  cache_manager::to_string(strategy), blocks));
        HandOverRun run(context, shape, instance, plan, blocks);
        const auto measure = [&](std::string_view what, const std::function<double()>& one) {
          BenchFigure figure;
          figure.bench = to_string(BenchKind::kHandOver);
          figure.strategy = fmt::format("{}: {}", cache_manager::to_string(strategy), what);
          figure.point = shape.point(blocks, Way::kBoth, Locality::kSequential);
          run.check(one);  // warms up, too
          for (std::uint32_t i = 0; i < config.samples; ++i) figure.us.add(one());
          context.report.figures.push_back(std::move(figure));
        };
        measure("stored, then loaded", [&run] { return run.store_then_load(); });
        for (const std::uint32_t piece : kPieces) {
          if (piece > 1 && piece >= blocks) continue;
          measure(fmt::format("handed over, {} block{} a store", piece, piece == 1 ? "" : "s"),
                  [&run, piece] { return run.hand_over(piece); });
        }
      });
    }
  }
}

}  // namespace kvferry::cli
