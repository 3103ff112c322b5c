// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/reuse_model.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace kvferry::cache_manager {
namespace {

constexpr double kFirstEdge = 4;  ///< At least: below that steps would be empty.
constexpr double kStepsBelowCapacity = 64;
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

/// What is less likely changes no worth.
constexpr double kCertain = 1e-9;

constexpr std::size_t kUseLevels = 7;
constexpr std::size_t kTurnLevels = 4;
static_assert(ReuseModel::kClasses == kUseLevels * kTurnLevels);

// 1, 2, 3 to 4, 5 to 8 and so on.
std::size_t level_of_uses(std::uint32_t uses) {
  const auto level = static_cast<std::size_t>(std::bit_width(std::max(uses, 1U) - 1));
  return std::min(level, kUseLevels - 1);
}

std::size_t level_of_turn(std::uint32_t turn) {
  if (turn <= 2) return turn <= 1 ? 0 : 1;
  return turn <= 4 ? 2 : 3;
}

/// Pools neighbours until rates fall with age, but for rises that are significant (pool adjacent
/// violators, reluctantly). events: what each rate is known by.
template <typename Curve> void let_fall(Curve& rates, const Curve& events) {
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

ReuseModel::ReuseModel(std::size_t capacity)
    : half_life_(40.0 * static_cast<double>(capacity) + 40'000.0),
      time_(kCells, 0),
      uses_(kCells, 0),
      squares_(kCells, 0),
      worth_(kCells, 0),
      order_(kCells, 0),
      ranks_(kCells, 0),
      of_request_(kCells, 0) {
  double edge = std::max(kFirstEdge, static_cast<double>(capacity) / kStepsBelowCapacity);
  for (std::size_t bin = 1; bin < kBins; ++bin, edge *= std::sqrt(2.0)) {
    edges_[bin] = static_cast<std::uint64_t>(edge);
  }
  edges_[kBins] = std::numeric_limits<std::uint64_t>::max();
  for (std::size_t bin = 0; bin < kBins; ++bin) {
    const auto begin = static_cast<double>(edges_[bin]);
    middles_[bin] =
        1 + (begin + std::min(static_cast<double>(edges_[bin + 1]), 1.5 * begin + 1)) / 2;
  }
  learn(time_, 0);
}

ReuseModel::Cell ReuseModel::first_cell(std::uint32_t uses, std::uint32_t turn) {
  return static_cast<Cell>((level_of_uses(uses) * kTurnLevels + level_of_turn(turn)) * kBins);
}

void ReuseModel::add_use(Cell cell) {
  if (of_request_[cell]++ == 0) touched_.push_back(cell);
}

void ReuseModel::end_request() {
  for (const Cell cell : touched_) {
    const double uses = of_request_[cell];
    uses_[cell] += uses;
    squares_[cell] += uses * uses;
    of_request_[cell] = 0;
  }
  touched_.clear();
}

// Uses by the requests that they were of, as if each had as many.
double ReuseModel::dispersion(double uses, double squares) const {
  return (squares + common_dispersion_ * common_dispersion_) / (uses + common_dispersion_);
}

ReuseModel::Curve ReuseModel::common_rates(std::span<const double> time) const {
  Curve rates{};
  Curve events{};
  for (std::size_t bin = 0; bin < kBins; ++bin) {
    double uses = 0;
    double squares = 0;
    double at_risk = 0;
    for (std::size_t cell = bin; cell < kCells; cell += kBins) {
      uses += uses_[cell];
      squares += squares_[cell];
      at_risk += time[cell];
    }
    // A rate that is unknown is as the one before it, by the ages.
    const double expected =
        bin == 0 ? kFirstGuess / middles_[0] : rates[bin - 1] * middles_[bin - 1] / middles_[bin];
    const double weight = 1 / dispersion(uses, squares);
    events[bin] = uses * weight + kBeliefInNeighbour;
    rates[bin] = events[bin] / (at_risk * weight + kBeliefInNeighbour / expected);
  }
  let_fall(rates, events);
  return rates;
}

void ReuseModel::learn(std::span<const double> pending, double passed) {
  const double kept = std::exp2(-passed / half_life_);
  for (std::vector<double>* counts : {&time_, &uses_, &squares_}) {
    for (double& count : *counts) count *= kept;
  }
  common_dispersion_ = (std::accumulate(squares_.begin(), squares_.end(), 0.0) + 1) /
                       (std::accumulate(uses_.begin(), uses_.end(), 0.0) + 1);
  std::vector<double> time(time_);
  for (std::size_t cell = 0; cell < kCells; ++cell) time[cell] += pending[cell];
  const Curve common = common_rates(time);
  std::vector<Curve> ratios_of(kClasses);  // To that.
  for (std::size_t block_class = 0; block_class < kClasses; ++block_class) {
    Curve rates{};
    Curve events{};
    Curve& ratios = ratios_of[block_class];
    const Curve* const below =
        block_class < kTurnLevels ? nullptr : &ratios_of[block_class - kTurnLevels];
    double before = 1;  // of the step before
    for (std::size_t bin = 0; bin < kBins; ++bin) {
      const std::size_t cell = block_class * kBins + bin;
      const double weight = 1 / dispersion(uses_[cell], squares_[cell]);
      const double in_step = below != nullptr && bin == 0 ? 0 : kBeliefInAll;
      const double in_below = below != nullptr ? kBeliefInAll : 0;
      const double rise = below != nullptr ? kRiseByUses * (*below)[bin] : 0;
      events[bin] = uses_[cell] * weight + in_step + in_below;
      const double ratio = (uses_[cell] * weight + in_step * before + in_below * rise) /
                           (time[cell] * common[bin] * weight + in_step + in_below);
      before = ratios[bin] = std::clamp(ratio, 1 / kMostRatio, kMostRatio);
      rates[bin] = common[bin] * ratios[bin];
    }
    let_fall(rates, events);
    set_worth(block_class, rates);
  }
  // Of equals the older ones, then the class of the lower number.
  std::array<std::pair<double, Cell>, kCells> by_worth;
  for (std::size_t cell = 0; cell < kCells; ++cell) {
    const std::size_t age = kBins - 1 - cell % kBins;
    by_worth[cell] = {worth_[cell], static_cast<Cell>(age * kClasses + cell / kBins)};
  }
  std::sort(by_worth.begin(), by_worth.end());
  for (std::size_t rank = 0; rank < kCells; ++rank) {
    const std::size_t place = by_worth[rank].second;
    order_[rank] = static_cast<Cell>(place % kClasses * kBins + kBins - 1 - place / kClasses);
    ranks_[order_[rank]] = static_cast<std::uint32_t>(rank);
  }
}

void ReuseModel::set_worth(std::size_t block_class, const Curve& rates) {
  Curve survival{};       // Through the step,
  Curve half_survival{};  // and through half of it: a block is somewhere in its own.
  Curve kept_in{};        // E(time kept in the step).
  for (std::size_t bin = 0; bin + 1 < kBins; ++bin) {
    const auto width = static_cast<double>(edges_[bin + 1] - edges_[bin]);
    half_survival[bin] = std::exp(-rates[bin] * width / 2);
    survival[bin] = half_survival[bin] * half_survival[bin];
    kept_in[bin] = (1 - survival[bin]) / rates[bin];
  }
  for (std::size_t first = 0; first < kBins; ++first) {
    if (first + 1 == kBins) {
      worth_[block_class * kBins + first] = rates[first];
      break;
    }
    double left = half_survival[first];       // P(not used yet)
    double kept = (1 - left) / rates[first];  // E(time until used, or end of the step)
    double best = (1 - left) / kept;
    for (std::size_t bin = first + 1; bin + 1 < kBins && left > kCertain; ++bin) {
      kept += left * kept_in[bin];
      left *= survival[bin];
      if ((1 - left) > best * kept) best = (1 - left) / kept;
    }
    worth_[block_class * kBins + first] = best;
  }
}

}  // namespace kvferry::cache_manager
