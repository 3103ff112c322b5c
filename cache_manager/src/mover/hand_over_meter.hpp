// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/strategy_choice.hpp"
#include "kvferry/ipc/base/clock.hpp"

#include <cstdint>

namespace kvferry::cache_manager {

/// Learns from hand-overs to the worker what they cost now. Compute that leaves gathers few
/// multiprocessors is seen here, as slower ones, and nowhere else by a mover. A line through what
/// was seen, of which the latest counts most; old sightings fade, so that a cost that kept staging
/// from being used is found out again.
/// @threading one thread.
class HandOverMeter {
 public:
  /// bytes were handed over when nothing else was with the worker, and came back after `took`.
  void add(std::uint64_t bytes, ipc::Duration took, ipc::TimePoint now) noexcept;
  [[nodiscard]] HandOverCost cost(ipc::TimePoint now) const noexcept;

 private:
  [[nodiscard]] double faded(ipc::TimePoint now) const noexcept;

  // Sums over sightings of MiB (x) and microseconds beyond the first estimate's line (y).
  double weight_ = 0;
  double x_ = 0;
  double xx_ = 0;
  double y_ = 0;
  double xy_ = 0;
  ipc::TimePoint last_{};
};

}  // namespace kvferry::cache_manager
