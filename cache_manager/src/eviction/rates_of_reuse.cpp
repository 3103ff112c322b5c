// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/rates_of_reuse.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvferry::cache_manager::reuse {
namespace {

/// Requests' worth of belief in the step before, and for a class in its own one before, and in the
/// class that is used half as often.
constexpr double kBeliefInNeighbour = 0.5;
constexpr double kBeliefInAll = 0.3;
/// Of a class little is known: its rate is so many times that of blocks used half as often. Caches
/// are like that; without it each class has to be learned by itself.
constexpr double kRiseByUses = 1.8;
/// A class's rate is at most so many times that of all, or one by that.
constexpr double kMostRatio = 30;
/// Standard deviations of a rise that is believed.
constexpr double kSignificant = 3;
/// Nothing is known: one block in ten is used again in the time that has passed since its last use.
constexpr double kFirstGuess = 0.1;

// 1, 2, 3 to 4, 5 to 8 and so on.
std::size_t level_of_uses(std::uint32_t uses) {
  const auto level = static_cast<std::size_t>(std::bit_width(std::max(uses, 1U) - 1));
  return std::min(level, kUseLevels - 1);
}

std::size_t level_of_turn(std::uint32_t turn) {
  if (turn <= 2) return turn <= 1 ? 0 : 1;
  return turn <= 4 ? 2 : 3;
}

// By gap the turn is one of the first two, or of the later ones.
static_assert(kTurnLevels == 2 * kGapLevels);

/// The group that a group leans on, of blocks used half as often; itself: none. Those used once
/// are told apart by turn alone: on the first turn lean the first two, the later on the second.
std::size_t group_below(std::size_t group, Grouping grouping) {
  if (group < kTurnLevels) return group;
  const std::size_t below = group - kTurnLevels;
  const bool is_used_once = below < kTurnLevels;
  return is_used_once && grouping == Grouping::kByGap ? below / kGapLevels : below;
}

/// Pools neighbours until rates fall with age, but for rises that are significant (pool adjacent
/// violators, reluctantly). @param events what each rate is known by
void let_fall(Curve& rates, const Curve& events) {
  struct Pool {
    double events = 0;
    double time = 0;
    std::size_t bins = 0;
    [[nodiscard]] double rate() const { return events / time; }
  };
  std::vector<Pool> pools;
  for (std::size_t bin = 0; bin < rates.size(); ++bin) {
    pools.push_back({events[bin], events[bin] / rates[bin], 1});
    while (pools.size() > 1) {
      const Pool later = pools.back();
      Pool& earlier = pools[pools.size() - 2];
      if (later.rate() <= earlier.rate()) break;
      const double both = (earlier.events + later.events) / (earlier.time + later.time);
      const double deviation =
          std::sqrt(both * later.time * earlier.time / (earlier.time + later.time));
      if (later.events - both * later.time > kSignificant * deviation) break;
      earlier.events += later.events;
      earlier.time += later.time;
      earlier.bins += later.bins;
      pools.pop_back();
    }
  }
  std::size_t bin = 0;
  for (const Pool& pool : pools) {
    std::fill_n(rates.begin() + static_cast<std::ptrdiff_t>(bin), pool.bins, pool.rate());
    bin += pool.bins;
  }
}

}  // namespace

std::size_t class_of(std::uint32_t uses, std::uint32_t turn, bool after_long) {
  const std::size_t group = level_of_uses(uses) * kTurnLevels + level_of_turn(turn);
  if (group < kTurnLevels) return group;
  return kTurnLevels + (group - kTurnLevels) * kGapLevels + (after_long ? 1 : 0);
}

std::size_t group_of(std::size_t block_class, Grouping grouping) {
  if (block_class < kTurnLevels) return block_class;
  const std::size_t group = kTurnLevels + (block_class - kTurnLevels) / kGapLevels;
  if (grouping == Grouping::kByTurn) return group;
  const std::size_t turn = group % kTurnLevels;
  return group - turn + turn / kGapLevels * kGapLevels + (block_class - kTurnLevels) % kGapLevels;
}

void Counts::decay(double kept) {
  for (std::vector<double>* counts : {&time, &uses, &squares}) {
    for (double& count : *counts) count *= kept;
  }
}

double dispersion(double uses, double squares, double common) {
  return (squares + common * common) / (uses + common);
}

Curve common_rates(const Counts& counts, const Curve& middles, double dispersed) {
  Curve rates{};
  Curve events{};
  for (std::size_t bin = 0; bin < kBins; ++bin) {
    double uses = 0;
    double squares = 0;
    double at_risk = 0;
    for (std::size_t cell = bin; cell < kCells; cell += kBins) {
      uses += counts.uses[cell];
      squares += counts.squares[cell];
      at_risk += counts.time[cell];
    }
    // A rate that is unknown is as the one before it, by the ages.
    const double expected =
        bin == 0 ? kFirstGuess / middles[0] : rates[bin - 1] * middles[bin - 1] / middles[bin];
    const double weight = 1 / dispersion(uses, squares, dispersed);
    events[bin] = uses * weight + kBeliefInNeighbour;
    rates[bin] = events[bin] / (at_risk * weight + kBeliefInNeighbour / expected);
  }
  let_fall(rates, events);
  return rates;
}

Rates rates_of(const Counts& counts, const Curve& common, double dispersed, Grouping grouping) {
  Rates time{};
  Rates uses{};
  Rates squares{};
  for (std::size_t cell = 0; cell < kCells; ++cell) {
    const std::size_t group = group_of(cell / kBins, grouping);
    const std::size_t bin = cell % kBins;
    time[group][bin] += counts.time[cell];
    uses[group][bin] += counts.uses[cell];
    squares[group][bin] += counts.squares[cell];
  }
  Rates rates{};
  Rates ratios{};  // To the common ones.
  for (std::size_t group = 0; group < kGroups; ++group) {
    Curve events{};
    const std::size_t below = group_below(group, grouping);
    const bool leans = below != group;
    double before = 1;  // of the step before
    for (std::size_t bin = 0; bin < kBins; ++bin) {
      const double weight = 1 / dispersion(uses[group][bin], squares[group][bin], dispersed);
      const double in_step = leans && bin == 0 ? 0 : kBeliefInAll;
      const double in_below = leans ? kBeliefInAll : 0;
      const double rise = leans ? kRiseByUses * ratios[below][bin] : 0;
      events[bin] = uses[group][bin] * weight + in_step + in_below;
      const double ratio = (uses[group][bin] * weight + in_step * before + in_below * rise) /
                           (time[group][bin] * common[bin] * weight + in_step + in_below);
      before = ratios[group][bin] = std::clamp(ratio, 1 / kMostRatio, kMostRatio);
      rates[group][bin] = common[bin] * before;
    }
    let_fall(rates[group], events);
  }
  return rates;
}

}  // namespace kvferry::cache_manager::reuse
