// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/reuse_model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace kvferry::cache_manager {
namespace {

using reuse::Curve;
using reuse::Grouping;

constexpr double kFirstEdge = 4;  ///< At least: below that steps would be empty.
constexpr double kStepsBelowCapacity = 64;
/// A use came long after the one before if the cache could have been filled so many times.
constexpr double kLongGap = 4;
/// How many times less likely the other grouping has to have made what happened before it is
/// believed as much as the first one, as a logarithm.
constexpr double kDoubt = 1;
/// Where one is believed, the other changes no rate.
constexpr double kBelieved = 0.99;
/// What is less likely changes no worth.
constexpr double kCertain = 1e-9;

}  // namespace

ReuseModel::ReuseModel(std::size_t capacity)
    : half_life_(40.0 * static_cast<double>(capacity) + 40'000.0),
      long_gap_(static_cast<std::uint64_t>(kLongGap * static_cast<double>(capacity))),
      told_time_(kCells, 0),
      told_uses_(kCells, 0),
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
  learn(std::vector<double>(kCells, 0), 0);
}

ReuseModel::Cell ReuseModel::first_cell(std::uint32_t uses, std::uint32_t turn, bool after_long) {
  return static_cast<Cell>(reuse::class_of(uses, turn, after_long) * kBins);
}

void ReuseModel::add_use(Cell cell) {
  if (of_request_[cell]++ == 0) touched_.push_back(cell);
}

void ReuseModel::end_request() {
  for (const Cell cell : touched_) {
    const double uses = of_request_[cell];
    counts_.uses[cell] += uses;
    counts_.squares[cell] += uses * uses;
    of_request_[cell] = 0;
  }
  touched_.clear();
}

void ReuseModel::learn(std::span<const double> pending, double passed) {
  const double kept = std::exp2(-passed / half_life_);
  reuse::Counts counts(counts_);
  for (std::size_t cell = 0; cell < kCells; ++cell) counts.time[cell] += pending[cell];
  evidence_ = (evidence_ + evidence_of(counts)) * kept;
  counts_.decay(kept);
  common_dispersion_ = (std::accumulate(counts_.squares.begin(), counts_.squares.end(), 0.0) + 1) /
                       (std::accumulate(counts_.uses.begin(), counts_.uses.end(), 0.0) + 1);
  counts = counts_;
  for (std::size_t cell = 0; cell < kCells; ++cell) counts.time[cell] += pending[cell];
  told_time_ = counts.time;
  told_uses_ = counts.uses;
  const Curve common = reuse::common_rates(counts, middles_, common_dispersion_);
  by_turn_ = reuse::rates_of(counts, common, common_dispersion_, Grouping::kByTurn);
  by_gap_ = reuse::rates_of(counts, common, common_dispersion_, Grouping::kByGap);
  for (std::size_t block_class = 0; block_class < kClasses; ++block_class) {
    set_worth(block_class, rates_of(block_class));
  }
  sort_by_worth();
}

// The likelihood of what happened since is that of a Poisson process: of each use its rate, and of
// the time at risk that there was none besides. Requests count, not blocks.
double ReuseModel::evidence_of(const reuse::Counts& counts) const {
  double evidence = 0;
  for (std::size_t cell = 0; cell < kCells; ++cell) {
    const double uses = std::max(0.0, counts.uses[cell] - told_uses_[cell]);
    const double time = std::max(0.0, counts.time[cell] - told_time_[cell]);
    if (uses == 0 && time == 0) continue;
    const double by_turn = rate_by(Grouping::kByTurn, cell);
    const double by_gap = rate_by(Grouping::kByGap, cell);
    const double weight =
        1 / reuse::dispersion(counts.uses[cell], counts.squares[cell], common_dispersion_);
    evidence += weight * (uses * std::log(by_gap / by_turn) - time * (by_gap - by_turn));
  }
  return evidence;
}

double ReuseModel::rate_by(Grouping grouping, std::size_t cell) const {
  const reuse::Rates& rates = grouping == Grouping::kByTurn ? by_turn_ : by_gap_;
  return rates[reuse::group_of(cell / kBins, grouping)][cell % kBins];
}

Curve ReuseModel::rates_of(std::size_t block_class) const {
  const Curve& by_turn = by_turn_[reuse::group_of(block_class, Grouping::kByTurn)];
  const Curve& by_gap = by_gap_[reuse::group_of(block_class, Grouping::kByGap)];
  const double belief = 1 / (1 + std::exp(kDoubt - evidence_));
  if (belief > kBelieved) return by_gap;
  if (belief < 1 - kBelieved) return by_turn;
  Curve rates{};
  for (std::size_t bin = 0; bin < kBins; ++bin) {
    rates[bin] = by_turn[bin] * std::pow(by_gap[bin] / by_turn[bin], belief);
  }
  return rates;
}

void ReuseModel::sort_by_worth() {
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
