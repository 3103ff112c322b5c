// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/restart_bench.hpp"

#include "bench/index_fill.hpp"
#include "must.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <random>
#include <string_view>

namespace kvferry::cli {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

/// Smaller blocks cannot be in a pool's catalogue.
constexpr std::uint64_t kRecordedChunk = 1'024;
constexpr std::uint64_t kRestartSlackBytes = 64ULL << 20;
constexpr ipc::Duration kLookPause = 1ms;
constexpr ipc::Duration kSumsPause = 100ms;
/// Between two kills: who dies five times in ten seconds is not started again.
constexpr ipc::Duration kLifeOfAManager = 3s;
constexpr std::uint64_t kLookSeed = 1;

enum RestartStep : std::size_t {
  kAnswers,
  kFirstFound,
  kAllFound,
  kProcessor,
  kLongestAnswer,
  kRestartSteps
};
constexpr std::array<std::string_view, kRestartSteps> kStepNames = {
    "answers", "first block found", "all blocks found", "manager's processor time until then",
    "longest answer meanwhile"};

class Restarts {
 public:
  Restarts(BenchContext& context, BenchInstance& instance, std::uint64_t prefixes)
      : context_(context), instance_(instance), prefixes_(prefixes) {}

  /// Of all blocks: what has none is lost with the manager.
  void wait_for_sums();
  void measure(std::array<BenchFigure, kRestartSteps>& figures);

 private:
  /// Nothing while it does not answer yet.
  std::optional<nlohmann::json> pool_status();
  [[nodiscard]] bool finds_any();

  BenchContext& context_;
  BenchInstance& instance_;
  const std::uint64_t prefixes_;
  std::mt19937_64 random_{kLookSeed};
};

std::optional<nlohmann::json> Restarts::pool_status() {
  const auto text = instance_.client().status(ipc::Deadline::after(IndexFill::kAnswer));
  if (!text) {
    const ipc::ErrorCode code = text.error().code;
    if (code == ipc::ErrorCode::kNoManager || code == ipc::ErrorCode::kPeerDied) return {};
    throw ipc::Exception(text.error());
  }
  const auto status = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!status.is_object() || !status.contains("pool")) {
    throw ipc::Exception(
        KVFERRY_ERROR(kProtocol, "the manager's status tells nothing of its pool"));
  }
  return status["pool"];
}

void Restarts::wait_for_sums() {
  for (;;) {
    const auto pool = pool_status();
    const std::uint64_t left = pool && pool->contains("integrity")
                                   ? (*pool)["integrity"].value("unsummed", std::uint64_t{0})
                                   : 1;
    if (left == 0) return;
    context_.doing(fmt::format("restart: {} blocks without checksums", left));
    must(instance_.run_for(ipc::Deadline::after(kSumsPause)));
  }
}

// Not pending ones: those cannot be loaded.
bool Restarts::finds_any() {
  const auto found = instance_.client().match_prefix(
      IndexFill::hashes_of(random_() % prefixes_, IndexFill::kPrefixBlocks));
  return found && found->usable > 0;
}

void Restarts::measure(std::array<BenchFigure, kRestartSteps>& figures) {
  const auto manager = [this] { return instance_.pid_of("manager"); };
  const std::optional<pid_t> killed = manager();
  must(instance_.kill_manager());
  must(instance_.run_until(
      [&] {
        (void)instance_.client().poll(1);
        return manager() && manager() != killed;
      },
      "the start of the next manager"));
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  std::array<std::optional<double>, kRestartSteps> times;
  double longest = 0;
  while (!times[kAllFound] || !times[kFirstFound]) {
    context_.check_interrupted();
    if (us_since(start) > 60e6) {
      throw ipc::Exception(KVFERRY_ERROR(kTimeout, "the blocks were not found again in 60 s"));
    }
    must(instance_.run_for(ipc::Deadline::after(kLookPause)));
    (void)instance_.client().poll(1);
    const ipc::TimePoint asked = ipc::MonotonicClock::now();
    const auto pool = pool_status();
    if (!times[kFirstFound] && finds_any()) times[kFirstFound] = us_since(start);
    if (!pool) continue;
    if (times[kAnswers]) longest = std::max(longest, us_since(asked));
    if (!times[kAnswers]) times[kAnswers] = us_since(start);
    const nlohmann::json& kept = (*pool)["kept"];
    if (!kept.is_object()) {
      throw ipc::Exception(KVFERRY_ERROR(kNotFound, "the next manager has not found the pool"));
    }
    const auto count = [&kept](const char* name) { return kept.value(name, std::uint64_t{0}); };
    if (count("adopted") + count("dropped") < count("found")) continue;
    if (count("adopted") != prefixes_ * IndexFill::kPrefixBlocks) {
      throw ipc::Exception(KVFERRY_ERROR(kNotFound, "{} of {} blocks were found again",
                                         count("adopted"), prefixes_ * IndexFill::kPrefixBlocks));
    }
    if (times[kAllFound]) continue;
    times[kAllFound] = us_since(start);
    times[kProcessor] = 1e6 * instance_.cpu_seconds_each().at("manager");
  }
  times[kLongestAnswer] = longest;
  for (std::size_t step = 0; step < kRestartSteps; ++step) {
    figures.at(step).us.add(times.at(step).value_or(0));
  }
}

void bench_shape(BenchContext& context, const BenchShape& shape) {
  const BenchConfig& config = context.config();
  const std::uint64_t prefixes =
      std::max<std::uint64_t>(1, config.entries / IndexFill::kPrefixBlocks);
  const std::uint64_t entries = prefixes * IndexFill::kPrefixBlocks;
  const InstancePlan plan = context.plan(shape, IndexFill::kStoreBlocks,
                                         entries * shape.moved_bytes() / 8 * 9 + kRestartSlackBytes,
                                         cache_manager::CopyStrategy::kAuto);
  for (const Locality locality : config.localities) {
    context.with_instance(shape, plan, [&](BenchInstance& instance) {
      Restarts restarts(context, instance, prefixes);
      // A mover that is too far behind with checksums leaves stores without them.
      IndexFill(context, instance, prefixes, locality).run("restart", [&] {
        restarts.wait_for_sums();
      });
      restarts.wait_for_sums();
      std::array<BenchFigure, kRestartSteps> figures;
      for (std::size_t step = 0; step < kRestartSteps; ++step) {
        figures.at(step).bench = to_string(BenchKind::kRestart);
        figures.at(step).strategy = fmt::format("{}, {} entries", kStepNames.at(step), entries);
        figures.at(step).point = shape.point(IndexFill::kPrefixBlocks, Way::kToHost, locality);
      }
      for (std::uint32_t i = 0; i < config.repeats; ++i) {
        context.doing(fmt::format("restart: {} of {}", i + 1, config.repeats));
        restarts.measure(figures);
        must(instance.run_for(ipc::Deadline::after(kLifeOfAManager)));
      }
      for (BenchFigure& figure : figures) context.report.figures.push_back(std::move(figure));
    });
  }
}

}  // namespace

void bench_restart(BenchContext& context) {
  const BenchConfig& config = context.config();
  if (config.geometries.empty()) {
    bench_shape(context,
                must(make_even_shape(kRecordedChunk, 1, config.ranks, context.dir().path())));
  }
  for (const std::string& name : config.geometries) {
    bench_shape(context, must(make_model_shape(name, config.ranks)));
  }
}

}  // namespace kvferry::cli
