// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/context.hpp"
#include "bench/figure.hpp"
#include "bench/shape.hpp"
#include "kvferry/ipc/base/clock.hpp"

#include <cstdint>
#include <vector>

namespace kvferry::cli {

/// A swap of one job to the host, of those that follow each other one at a time.
struct TimedSwap {
  /// First tried, and refused as long as the host pool had no room so far.
  ipc::TimePoint tried;
  ipc::TimePoint submitted;  ///< When it was taken.
  ipc::TimePoint ended;      ///< Its completion was seen.
  std::uint64_t bytes = 0;
};

/// Swaps from the start of a manager until its pool was full.
struct PoolTimes {
  /// From the manager's start to the end of the swap with the last of the first bytes; of the last
  /// swap where the pool had no room for so many.
  double first_us = 0;
  Samples first;          ///< Microseconds of each swap, up to that one,
  Samples rest;           ///< and of those after it.
  double awaited_us = 0;  ///< In all: for room that was not there yet.
};
/// @pre swaps are not empty, and in their order.
[[nodiscard]] PoolTimes pool_times_of(const std::vector<TimedSwap>& swaps,
                                      ipc::TimePoint manager_start,
                                      std::uint64_t first_bytes);

/// A young instance whose pool comes while it is used, from its manager's start on: until the first
/// GiB was swapped out, and how long single swaps take meanwhile, while the rest is filled and
/// registered, and when all of it is there. Throws Exception.
void bench_pool_swaps(BenchContext& context, const BenchShape& shape);

}  // namespace kvferry::cli
