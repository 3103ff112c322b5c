// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/pair_rounds.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <utility>

namespace kvferry::cli {
namespace {

constexpr double kTail = 0.99;
constexpr std::uint32_t kDraws = 2'000;
/// Of the draws, on each side of the spread.
constexpr double kBeyond = 0.025;
constexpr std::uint64_t kDrawSeed = 1;

double mean_of(const Samples& samples) {
  return std::accumulate(samples.values().begin(), samples.values().end(), 0.0) /
         static_cast<double>(samples.size());
}

/// The rounds of all pairs, the longest first, so that a draw's tail is found without sorting it.
class DrawnRounds {
 public:
  DrawnRounds(const std::vector<const PairRounds*>& pairs, Samples PairRounds::*which) {
    for (std::size_t pair = 0; pair < pairs.size(); ++pair) {
      const std::vector<double>& rounds = (pairs[pair]->*which).values();
      sizes_.push_back(rounds.size());
      for (const double round : rounds) rounds_.emplace_back(round, pair);
    }
    std::sort(rounds_.begin(), rounds_.end(), std::greater<>());
  }

  /// As Samples::quantile() of so many times each pair's rounds.
  [[nodiscard]] double quantile(const std::vector<std::uint32_t>& times, double share) const {
    std::uint64_t all = 0;
    for (std::size_t pair = 0; pair < sizes_.size(); ++pair) all += times[pair] * sizes_[pair];
    const auto rank = static_cast<std::uint64_t>(std::ceil(share * static_cast<double>(all)));
    const std::uint64_t from_longest = all - std::clamp<std::uint64_t>(rank, 1, all) + 1;
    std::uint64_t seen = 0;
    for (const auto& [round, pair] : rounds_) {
      seen += times[pair];
      if (seen >= from_longest) return round;
    }
    return rounds_.back().first;
  }

 private:
  std::vector<std::pair<double, std::size_t>> rounds_;  ///< And of which pair.
  std::vector<std::uint64_t> sizes_;
};

}  // namespace

std::optional<Spread> spread_of_ratio(const std::vector<PairRounds>& pairs,
                                      Samples PairRounds::*of,
                                      Samples PairRounds::*to,
                                      double quantile) {
  std::vector<const PairRounds*> counted;
  for (const PairRounds& pair : pairs) {
    if (!(pair.*of).empty() && !(pair.*to).empty()) counted.push_back(&pair);
  }
  if (counted.size() < 2) return std::nullopt;
  const DrawnRounds above(counted, of);
  const DrawnRounds below(counted, to);
  // NOLINTNEXTLINE(cert-msc32-c,cert-msc51-cpp): the same spread for the same pairs
  std::mt19937_64 random(kDrawSeed);
  Samples ratios;
  std::vector<std::uint32_t> times(counted.size());
  for (std::uint32_t draw = 0; draw < kDraws; ++draw) {
    std::fill(times.begin(), times.end(), 0U);
    for (std::size_t i = 0; i < counted.size(); ++i) ++times[random() % counted.size()];
    ratios.add(above.quantile(times, quantile) / below.quantile(times, quantile));
  }
  return Spread{ratios.quantile(kBeyond), ratios.quantile(1 - kBeyond)};
}

void add_pairs(const std::vector<PairRounds>& pairs, BenchFigure& figure) {
  Samples without;
  Samples beside;
  Samples beside_copy;
  std::vector<PairRounds> counted;
  for (const PairRounds& pair : pairs) {
    if (pair.without.empty() || pair.beside.empty()) continue;  // rounds longer than a phase
    counted.push_back(pair);
    figure.slowdown.add(mean_of(pair.beside) / mean_of(pair.without));
    without.add_all(pair.without);
    beside.add_all(pair.beside);
    if (pair.beside_copy.empty()) continue;
    figure.slowdown_beyond_copy.add(mean_of(pair.beside) / mean_of(pair.beside_copy));
    beside_copy.add_all(pair.beside_copy);
  }
  if (counted.empty()) return;
  figure.round_us =
      RoundTimes{without.median(), without.quantile(kTail), beside.median(), beside.quantile(kTail),
                 beside_copy.empty() ? 0 : beside_copy.quantile(kTail)};
  figure.p99_spread = spread_of_ratio(counted, &PairRounds::beside, &PairRounds::without, kTail);
  figure.p99_beyond_copy_spread =
      spread_of_ratio(counted, &PairRounds::beside, &PairRounds::beside_copy, kTail);
}

}  // namespace kvferry::cli
