// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// What the manager says of its host pool.
struct PoolSample {
  std::uint64_t placed_blocks = 0;   ///< Since the manager's start,
  std::uint64_t placed_extents = 0;  ///< in so many runs of neighbours.
  std::uint64_t free_bytes = 0;
  std::uint64_t slabs = 0;
  /// Of the free bytes those within slabs: only blocks of a slab's kind can have them, if any.
  std::uint64_t free_in_slabs = 0;

  [[nodiscard]] double blocks_per_extent() const noexcept {
    return placed_extents == 0
               ? 0.0
               : static_cast<double>(placed_blocks) / static_cast<double>(placed_extents);
  }
};
/// Nothing when the status of a manager does not say all of it.
[[nodiscard]] std::optional<PoolSample> pool_of_status(std::string_view json);

/// A look at a run: how much memory its processes have, and how the host pool is filled.
struct RunSample {
  std::uint64_t requests = 0;  ///< Done by then.
  double seconds = 0;          ///< Since the first request was taken.
  /// Of each process that ran ("manager", "mover/0", "replay"), see anonymous_kib().
  std::map<std::string, std::uint64_t> anonymous_kib;
  std::optional<PoolSample> pool;  ///< Nothing: the manager was away, or silent.
};
inline constexpr std::size_t kMostSamples = 64;

/// When to take the samples of a run, and the list of them, which never has more than kMostSamples:
/// when it is full, every second one goes, and the next ones are taken half as often.
class SampleList {
 public:
  /// Whether one is to be taken now, after so many requests.
  [[nodiscard]] bool is_due(std::uint64_t requests) const noexcept { return requests >= next_; }
  /// In the place of one after as many requests.
  void add(RunSample sample);
  /// Of the sample that was added last.
  void set_pool(const PoolSample& pool) { samples_.back().pool = pool; }
  [[nodiscard]] const std::vector<RunSample>& samples() const noexcept { return samples_; }

 private:
  std::vector<RunSample> samples_;
  std::uint64_t interval_ = 1;  ///< Requests.
  std::uint64_t next_ = 0;
};

[[nodiscard]] nlohmann::json to_json(const std::vector<RunSample>& samples);

/// Two moments of a run that tell whether something grows: about a quarter of its requests, when
/// all is warm, and its end.
struct SamplePair {
  const RunSample* quarter = nullptr;
  const RunSample* end = nullptr;
};
/// Of the samples that have as many processes as any, and with_pool: the pool, too. Nothing when
/// the run is too short for both, that is when none lies between an eighth and a half of it.
[[nodiscard]] std::optional<SamplePair> quarter_and_end(const std::vector<RunSample>& samples,
                                                        bool with_pool);
/// What the pair says of the processes, in words: "manager 10.0 MiB to 10.1 MiB, movers ...".
[[nodiscard]] std::string describe_memory(const SamplePair& pair);

}  // namespace kvferry::cli
