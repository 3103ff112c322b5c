// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// Where bytes go: kBoth is one of each at the same time, counted together.
enum class Way : std::uint8_t { kToHost = 1, kToDevice, kBoth };
[[nodiscard]] std::string_view to_string(Way way) noexcept;  ///< "d2h", "h2d", "both".

/// Jobs to the host have the first lane of two, those to the device the second.
inline constexpr std::size_t kToHostLane = 0;
inline constexpr std::size_t kToDeviceLane = 1;
[[nodiscard]] constexpr bool has_lane(Way way, std::size_t lane) noexcept {
  return way == Way::kBoth || (way == Way::kToHost) == (lane == kToHostLane);
}

/// Which device blocks a job names: a run of neighbours, or any of the arena.
enum class Locality : std::uint8_t { kSequential = 1, kRandom };
[[nodiscard]] std::string_view to_string(Locality locality) noexcept;

/// kEngine: engine, manager, mover and worker, processes of their own. kBare: the same copies by
/// bare calls in one process, without anything around them. Of the benchmark "ablation" kMover is
/// what kEngine is of others, and kOwn a worker that copies by itself.
enum class BenchPath : std::uint8_t { kEngine = 1, kBare, kMover, kOwn };
[[nodiscard]] std::string_view to_string(BenchPath path) noexcept;

[[nodiscard]] double us_since(ipc::TimePoint start) noexcept;

/// What several runs of one measurement gave.
class Samples {
 public:
  void add(double value) { values_.push_back(value); }
  [[nodiscard]] bool empty() const noexcept { return values_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return values_.size(); }
  void add_all(const Samples& other) {
    values_.insert(values_.end(), other.values_.begin(), other.values_.end());
  }
  [[nodiscard]] const std::vector<double>& values() const noexcept { return values_; }
  /// The value that this share of them (0 to 1) does not exceed; 0.5: the median, of an even number
  /// the mean of the middle two. @pre not empty.
  [[nodiscard]] double quantile(double share) const;
  [[nodiscard]] double median() const { return quantile(0.5); }
  [[nodiscard]] double least() const { return quantile(0); }
  [[nodiscard]] double most() const { return quantile(1); }

 private:
  std::vector<double> values_;
};

/// The link: one large copy of pinned memory, in GB/s (10^9 bytes per second).
struct LinkLimit {
  Samples to_host;
  Samples to_device;
  Samples both;
  [[nodiscard]] const Samples& of(Way way) const noexcept;
  [[nodiscard]] Samples& of(Way way) noexcept;
};

/// What a figure is of.
struct BenchPoint {
  std::string geometry;
  std::uint64_t chunk_bytes =
      0;  ///< One block's slice of one region; their mean where they differ.
  std::uint32_t regions = 0;
  std::uint64_t block_bytes = 0;  ///< Of all regions, of all ranks.
  std::uint32_t blocks = 0;       ///< Of one job.
  Way way = Way::kToHost;
  Locality locality = Locality::kSequential;
};

/// What interference calls one large copy, which is of no kind of job: its point names the first.
inline constexpr std::string_view kOneCopy = "one copy";

/// Microseconds of a round of a load (of a decoding one: from token to token), without copies and
/// beside them.
struct RoundTimes {
  double median = 0;
  double p99 = 0;
  double median_beside = 0;
  double p99_beside = 0;
  /// Beside one large copy of another process, in the same pairs; 0: not measured.
  double p99_beside_copy = 0;
};

/// From where to where a figure may lie, as far as what was measured tells.
struct Spread {
  double low = 0;
  double high = 0;
};

struct BenchFigure {
  std::string bench;  ///< "transfer", "latency" and so on.
  std::string strategy;
  BenchPath path = BenchPath::kEngine;
  BenchPoint point;
  Samples gbps;
  Samples us;                               ///< From submit to completion, of one job at a time.
  std::optional<double> share;              ///< Of the link's limit.
  std::optional<double> per_second;         ///< Jobs.
  std::optional<double> cpu_ms_per_gib;     ///< Of all processes of the path together.
  std::optional<std::uint64_t> pool_bytes;  ///< Of host memory, of the benchmark "pool".
  std::string load;                         ///< What the worker computed beside; empty: nothing.
  /// Of its rounds beside these copies to those beside one large copy of another process, in the
  /// same pairs.
  Samples slowdown_beyond_copy;
  Samples copy_gbps;  ///< Of that large copy, beside the same load.
  Samples slowdown;   ///< Of its rounds: pairs of a phase with copies and the one before without.
  std::optional<RoundTimes> round_us;
  /// Of the 99th percentile beside copies to that without, and to that beside one large copy.
  std::optional<Spread> p99_spread;
  std::optional<Spread> p99_beyond_copy_spread;
  /// From SIGKILL to what copies, under traffic, until a job that was submitted after its death has
  /// completed well.
  std::optional<double> recovery_us;
  Samples core_share;              ///< Processor time of an idle process, of one core's.
  std::optional<bool> arena_kept;  ///< Over that death: what device blocks hold.
};

}  // namespace kvferry::cli
