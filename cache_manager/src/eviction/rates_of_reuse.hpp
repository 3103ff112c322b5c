// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry::cache_manager::reuse {

/// Blocks are of a class by how often they were used, which turn they continue and, once they were
/// used again, by how long they had waited for that.
inline constexpr std::size_t kUseLevels = 7;
inline constexpr std::size_t kTurnLevels = 4;
inline constexpr std::size_t kGapLevels = 2;
inline constexpr std::size_t kClasses = kTurnLevels + (kUseLevels - 1) * kTurnLevels * kGapLevels;
inline constexpr std::size_t kBins = 40;  ///< Steps of age.
inline constexpr std::size_t kCells = kClasses * kBins;

/// @param after_long whether the last use came long after the one before
[[nodiscard]] std::size_t class_of(std::uint32_t uses, std::uint32_t turn, bool after_long);

/// What happened to the blocks of each cell, a class and a step of age.
struct Counts {
  std::vector<double> time = std::vector<double>(kCells, 0);  ///< At risk of being used.
  std::vector<double> uses = std::vector<double>(kCells, 0);
  std::vector<double> squares = std::vector<double>(kCells, 0);  ///< Of each request's uses.

  void decay(double kept);
};

/// Uses by the requests that they were of, as if each had as many.
[[nodiscard]] double dispersion(double uses, double squares, double common);

using Curve = std::array<double, kBins>;

/// Of all blocks. @param middles of the steps of age
[[nodiscard]] Curve common_rates(const Counts& counts, const Curve& middles, double dispersed);

/// What tells classes apart that are used as often: their turn; or how long they had waited, and
/// only whether their turn is one of the first two. To tell by all at once is to know little of
/// each.
enum class Grouping : std::uint8_t { kByTurn, kByGap };
inline constexpr std::size_t kGroups = kUseLevels * kTurnLevels;
[[nodiscard]] std::size_t group_of(std::size_t block_class, Grouping grouping);

/// Of each group, over its age.
using Rates = std::array<Curve, kGroups>;
[[nodiscard]] Rates rates_of(const Counts& counts,
                             const Curve& common,
                             double dispersed,
                             Grouping grouping);

}  // namespace kvferry::cache_manager::reuse
