// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eviction/rates_of_reuse.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvferry::cache_manager {

/// How soon blocks are used again, learned from what happened to blocks like them; and what a block
/// is worth for that.
///
/// Blocks that have as many uses, continue as many turns and had waited as long for their last use
/// are of one class. Of each class the rate of reuse is estimated over the time since a block's
/// last use: uses by the blocks' time at risk, in steps of half an octave. That is the hazard rate
/// of survival analysis; blocks that were never used again count with the time that they were
/// watched (censored), evicted ones go on being watched. Where there is little data, an estimate
/// leans on the steps before it, a class on all classes; and a rate rises with time only where that
/// is significant: acting on noise costs more than the noise hides. Blocks are used again together,
/// so that events are counted as requests, not as blocks (overdispersion by hits squared). A class
/// leans on the one that is used half as often, as well.
///
/// Classes are taken together in two ways, by their turn and by what they had waited, and each way
/// tells what is going to happen before it does: the one that was right is believed, in between
/// both are (the prequential principle: Dawid, "Present Position and Potential Developments: Some
/// Personal Views: Statistical Theory: The Prequential Approach", 1984). Of sessions the turn tells
/// more; where documents are asked about beside them, what is used again after long is one of
/// those, however often it was used.
///
/// Worth: the most uses for the time of a place that keeping a block for any while can be expected
/// to bring, max over t of P(used by t) / E(time kept until then). (The index of Gittins, 1979; hit
/// density in caches: Beckmann, Chen, Cidon, "LHD: Improving Cache Hit Rate by Maximizing Hit
/// Density", NSDI 2018.)
/// @threading one thread.
class ReuseModel {
 public:
  static constexpr std::size_t kBins = reuse::kBins;
  static constexpr std::size_t kClasses = reuse::kClasses;
  static constexpr std::size_t kCells = reuse::kCells;
  using Cell = std::uint32_t;  ///< A class and a step of age.

  /// Ages are in blocks used by anybody. @param capacity of the cache, in blocks
  explicit ReuseModel(std::size_t capacity);

  /// @param after_long whether the last use came long after the one before (is_long())
  [[nodiscard]] static Cell first_cell(std::uint32_t uses, std::uint32_t turn, bool after_long);
  /// @param gap between two uses, in blocks used by anybody
  [[nodiscard]] bool is_long(std::uint64_t gap) const { return gap > long_gap_; }
  [[nodiscard]] static std::size_t bin_of(Cell cell) { return cell % kBins; }
  /// Where a block goes at the end of its cell; the last step has no end.
  [[nodiscard]] static bool is_last(Cell cell) { return bin_of(cell) + 1 == kBins; }
  [[nodiscard]] std::uint64_t begin(Cell cell) const { return edges_[bin_of(cell)]; }
  [[nodiscard]] std::uint64_t end(Cell cell) const { return edges_[bin_of(cell) + 1]; }

  /// A block spent this time in a cell.
  void add_time(Cell cell, double time) { counts_.time[cell] += time; }
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
  /// How much likelier what happened since the last learn() was by gap than by turn, logarithm.
  [[nodiscard]] double evidence_of(const reuse::Counts& counts) const;
  [[nodiscard]] double rate_by(reuse::Grouping grouping, std::size_t cell) const;
  [[nodiscard]] reuse::Curve rates_of(std::size_t block_class) const;
  void set_worth(std::size_t block_class, const reuse::Curve& rates);
  void sort_by_worth();

  std::array<std::uint64_t, kBins + 1> edges_{};
  reuse::Curve middles_{};
  double half_life_;
  std::uint64_t long_gap_;
  reuse::Counts counts_;
  double common_dispersion_ = 1;
  reuse::Rates by_turn_{};
  reuse::Rates by_gap_{};
  double evidence_ = 0;            ///< Of what is known already, old one counts less.
  std::vector<double> told_time_;  ///< What the last learn() was told, as it counts now.
  std::vector<double> told_uses_;
  std::vector<double> worth_;
  std::vector<Cell> order_;
  std::vector<std::uint32_t> ranks_;
  std::vector<std::uint32_t> of_request_;  ///< Uses.
  std::vector<Cell> touched_;              ///< By the present request.
};

}  // namespace kvferry::cache_manager
