// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/figure.hpp"
#include "kvferry/cache_manager/mover.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/worker/compute_load.hpp"
#include "rank_options.hpp"
#include "run_options.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvferry::cli {

enum class BenchKind : std::uint8_t {
  kTransfer = 1,
  kLatency,
  kInterference,
  kLayers,
  kSubmit,
  kLookup,
  kClear,
  kPool,
  kAblation,
  kIdle,
  kUrgent,
  kRestart,
  kHandOver
};
inline constexpr std::array kBenchKinds = {
    BenchKind::kTransfer, BenchKind::kLatency, BenchKind::kInterference, BenchKind::kLayers,
    BenchKind::kSubmit,   BenchKind::kLookup,  BenchKind::kClear,        BenchKind::kPool,
    BenchKind::kAblation, BenchKind::kIdle,    BenchKind::kUrgent,       BenchKind::kRestart,
    BenchKind::kHandOver};
[[nodiscard]] std::string_view to_string(BenchKind kind) noexcept;

/// What is measured: every combination of the lists.
struct BenchConfig {
  std::string runtime_base;
  std::string instance = "bench";
  ipc::LogLevel log_level = ipc::LogLevel::kInfo;
  std::string plot_file;  ///< Empty: none.
  std::string log_dir;    ///< Empty: in the run's directory, removed at the end.
  std::vector<BenchKind> kinds;
  DeviceChoice devices;
  std::uint32_t ranks = 1;
  ArenaChoice arena;
  std::vector<std::uint64_t> chunk_sizes;
  std::vector<std::uint32_t> regions;
  std::vector<std::string> geometries;  ///< In the place of the two above.
  std::vector<std::uint32_t> blocks;
  std::vector<Way> ways;
  std::vector<Locality> localities;
  /// Nothing: auto and all that the arena can do.
  std::vector<cache_manager::CopyStrategy> strategies;
  bool bare = true;                            ///< Also others' ways of copying, in one process.
  std::vector<worker::ComputeLoadKind> loads;  ///< Of interference.
  std::uint32_t pairs = 30;                    ///< Of phases without and with copies.
  std::uint32_t repeats = 5;
  std::uint64_t bytes = 0;          ///< Each way, of one repeat.
  std::uint32_t samples = 100;      ///< Of a latency, a lookup or a submit.
  std::uint64_t entries = 100'000;  ///< Of the prefix index.
  std::uint64_t pool_bytes =
      0;  ///< Of the host pool that is made, and of the arena that is cleared.
  std::chrono::milliseconds patience{30'000};
  bool json = false;
};

/// Measures, and tells on stdout. What the command exits with.
int run_bench(const BenchConfig& config);

}  // namespace kvferry::cli
