// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "bench/figure.hpp"

#include <optional>
#include <vector>

namespace kvferry::cli {

/// The rounds of a load, in microseconds, in one pair of phases.
struct PairRounds {
  Samples without;      ///< Copies.
  Samples beside;       ///< The copies that are measured.
  Samples beside_copy;  ///< One large copy of another process; nothing: not measured.
};

/// Where the ratio of a quantile of the rounds of `of` to that of `to`, each over all pairs, may
/// lie: what 95 % of many draws of as many pairs, each put back, have between them. Whole pairs are
/// drawn because the rounds of one phase are alike: they are no samples of their own. The same for
/// the same pairs. Nothing for fewer than two pairs that have rounds of both, from which no spread
/// is known.
[[nodiscard]] std::optional<Spread> spread_of_ratio(const std::vector<PairRounds>& pairs,
                                                    Samples PairRounds::*of,
                                                    Samples PairRounds::*to,
                                                    double quantile);

/// What pairs tell: the figure's slowdowns, its times of rounds, and the spread of their tails.
/// Pairs with a phase in which no round lay whole do not count; slowdown stays empty when none
/// does.
void add_pairs(const std::vector<PairRounds>& pairs, BenchFigure& figure);

}  // namespace kvferry::cli
