// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/strategy_choice.hpp"
#include "kvferry/ipc/base/clock.hpp"

#include <array>
#include <cstdint>
#include <optional>

namespace kvferry::cache_manager {

/// Learns from hand-overs to the worker what they cost now. Compute that leaves gathers few
/// multiprocessors is seen here, as slower ones, and nowhere else by a mover. A line through what
/// was seen, of which the latest counts most. Of each three in a row the middle one counts: a
/// worker's first launch, or one that came behind a long kernel, takes ten times as long, and one
/// such sighting would keep staging, and with it all others, away until it had faded. (Of three of
/// about one size: large ones are no strays among small ones.) What was seen
/// does fade, so that a cost that kept staging from being used is found out again: soon where it
/// has been high for a moment, the later the longer that has been so.
/// @threading one thread.
class HandOverMeter {
 public:
  /// bytes were handed over when nothing else was with the worker, and came back after `took`.
  void add(std::uint64_t bytes, ipc::Duration took, ipc::TimePoint now) noexcept;
  [[nodiscard]] HandOverCost cost(ipc::TimePoint now) const noexcept;

 private:
  struct Sighting {
    double mib = 0;
    double us = 0;
    double over_first = 1;  ///< The time, of what the first estimate says.
  };
  [[nodiscard]] double faded(ipc::TimePoint now) const noexcept;
  /// In which sightings lose half of their weight.
  [[nodiscard]] double fading_s() const noexcept;
  void count(const Sighting& seen, ipc::TimePoint now) noexcept;

  /// Before anything was seen, all was as the first estimate says, which counts nothing.
  using Before = std::array<std::optional<Sighting>, 2>;
  /// Those of less than 1 MiB, than 4, and the rest.
  std::array<Before, 3> before_;
  ipc::TimePoint seen_{};  ///< The last one.

  // Sums over sightings of MiB (x) and microseconds beyond the first estimate's line (y).
  double weight_ = 0;
  double x_ = 0;
  double xx_ = 0;
  double y_ = 0;
  double xy_ = 0;
  ipc::TimePoint counted_{};                  ///< The last one.
  std::optional<ipc::TimePoint> slow_since_;  ///< Nothing: the last one that counted was not.
};

}  // namespace kvferry::cache_manager
