// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "rl/verifier.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace kvferry::cli {

/// The caching allocator of one rank's worker around the end of a pause, and its device.
struct RankReserve {
  std::uint64_t reserved_before = 0;  ///< Taken from the driver, while paused.
  std::uint64_t used_before = 0;
  std::uint64_t reserved_after = 0;  ///< When emptied; without emptying, once it runs again.
  std::uint64_t used_after = 0;
  std::uint64_t free_on_device = 0;  ///< The driver's view, at the same time.
};

/// One iteration of an RL loop.
struct IterationRecord {
  std::uint32_t number = 0;   ///< From 1.
  std::uint32_t version = 0;  ///< Of the weights in use at its end.
  ipc::Digest weights;        ///< The engine's identity of them.
  std::vector<RankReserve> ranks;
  double seconds = 0;  ///< From its first request until it was looked at for the last time.
  double pause_ms = 0;
  std::optional<double> release_ms;
  std::optional<double> resume_ms;
  std::uint64_t free_while_released = 0;  ///< On the device that has the least, by the driver.
  std::optional<double> update_ms;
  std::optional<double> clear_ms;
  std::optional<double> reinit_ms;
  double continue_ms = 0;
  AnswerCounts answers;   ///< To its own requests, some of which end in the next iteration.
  bool finished = false;  ///< Everything above was done; else the run ended in it.

  /// Of all ranks.
  [[nodiscard]] RankReserve total() const {
    RankReserve sum;
    for (const RankReserve& rank : ranks) {
      sum.reserved_before += rank.reserved_before;
      sum.used_before += rank.used_before;
      sum.reserved_after += rank.reserved_after;
      sum.used_after += rank.used_after;
      sum.free_on_device += rank.free_on_device;
    }
    return sum;
  }
  /// On the device that has the least.
  [[nodiscard]] std::uint64_t least_free() const {
    std::uint64_t least = ranks.empty() ? 0 : UINT64_MAX;
    for (const RankReserve& rank : ranks) {
      least = rank.free_on_device < least ? rank.free_on_device : least;
    }
    return least;
  }
};

}  // namespace kvferry::cli
