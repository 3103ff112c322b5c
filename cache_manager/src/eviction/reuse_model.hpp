// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvferry::cache_manager {

/// How soon blocks are used again, learned from what happened to blocks like them; and what a block
/// is worth for that.
///
/// Blocks that have as many uses, and continue as many turns, are of one class. Of each class the
/// rate of reuse is estimated over the time since a block's last use: uses by the blocks' time at
/// risk, in steps of half an octave. That is the hazard rate of survival analysis; blocks that were
/// never used again count with the time that they were watched (censored), evicted ones go on being
/// watched. Where there is little data, an estimate leans on the steps before it, a class on all
/// classes; and a rate rises with time only where that is significant: acting on noise costs more
/// than the noise hides. Blocks are used again together, so that events are counted as requests,
/// not as blocks (overdispersion by hits squared). A class leans on the one that is used half as
/// often, as well.
///
/// Worth: the most uses for the time of a place that keeping a block for any while can be expected
/// to bring, max over t of P(used by t) / E(time kept until then). (The index of Gittins, 1979; hit
/// density in caches: Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit
/// Density", NSDI 2018.)
/// @threading one thread.
class ReuseModel {
 public:
  static constexpr std::size_t kBins = 40;  ///< Steps of age.
  static constexpr std::size_t kClasses = 28;
  static constexpr std::size_t kCells = kClasses * kBins;
  using Cell = std::uint32_t;  ///< A class and a step of age.

  /// Ages are in blocks used by anybody. @param capacity of the cache, in blocks
  explicit ReuseModel(std::size_t capacity);

  [[nodiscard]] static Cell first_cell(std::uint32_t uses, std::uint32_t turn);
  [[nodiscard]] static std::size_t bin_of(Cell cell) { return cell % kBins; }
  /// Where a block goes at the end of its cell; the last step has no end.
  [[nodiscard]] static bool is_last(Cell cell) { return bin_of(cell) + 1 == kBins; }
  [[nodiscard]] std::uint64_t begin(Cell cell) const { return edges_[bin_of(cell)]; }
  [[nodiscard]] std::uint64_t end(Cell cell) const { return edges_[bin_of(cell) + 1]; }

  /// A block spent this time in a cell.
  void add_time(Cell cell, double time) { time_[cell] += time; }
  /// A block of the cell was used again, by the present request.
  void add_use(Cell cell);
  void end_request();

  /// What is known now becomes what blocks are worth. @param pending time of blocks in each cell
  /// that add_time() was not told yet. @param passed since the last time: what is old counts less
  void learn(std::span<const double> pending, double passed);
  [[nodiscard]] double worth(Cell cell) const { return worth_[cell]; }
  /// All cells, those worth least first; of equals the older ones.
  [[nodiscard]] std::span<const Cell> by_worth() const { return order_; }
  /// Where it is among those.
  [[nodiscard]] std::size_t rank(Cell cell) const { return ranks_[cell]; }

 private:
  using Curve = std::array<double, kBins>;

  [[nodiscard]] double dispersion(double uses, double squares) const;
  [[nodiscard]] Curve common_rates(std::span<const double> time) const;
  void set_worth(std::size_t block_class, const Curve& rates);

  std::array<std::uint64_t, kBins + 1> edges_{};
  Curve middles_{};
  double half_life_;
  std::vector<double> time_;
  std::vector<double> uses_;
  std::vector<double> squares_;  ///< Of each request's uses.
  std::vector<double> worth_;
  std::vector<Cell> order_;
  std::vector<std::uint32_t> ranks_;
  std::vector<std::uint32_t> of_request_;  ///< Uses.
  std::vector<Cell> touched_;              ///< By the present request.
  double common_dispersion_ = 1;
};

}  // namespace kvferry::cache_manager
