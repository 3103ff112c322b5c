// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "eviction/race.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <cmath>

namespace kvferry::cache_manager {
namespace {

/// What was found counts half after so many times the capacity, and so many requests like it.
constexpr double kHalfLifeInCapacities = 20;
constexpr double kHalfLifeInRequests = 200;
/// Standard deviations by which another one must have found more, and number 0.
constexpr double kSureDeviations = 3;
constexpr double kSureDeviationsOfFirst = 0.5;
/// What the cache may have missed of what the best policy found, and LRU: a part of all blocks,
/// one of the capacity, as it takes a while to become like another one, and some standard
/// deviations, as a single request may be luck.
constexpr double kMostMissed = 0.0015;
constexpr double kMostMissedOfLru = 0.001;
constexpr double kMostMissedOfCapacity = 0.015;
constexpr double kLuckDeviations = 0.5;
/// By so many deviations more than LRU another policy, and number 0, has half of its say; and how
/// steeply that grows.
constexpr double kHalfASay = 1;
constexpr double kHalfASayOfFirst = 0.5;
constexpr double kSteepness = 4;
/// What the leader has to say more. Of two it has the last word: there is nothing in between, and a
/// cache that goes from one to the other pays for it.
constexpr double kSayOfLeader = 0.3;
constexpr double kSayOfLeaderOfTwo = 2;

}  // namespace

Race::Race(std::size_t capacity, std::size_t count)
    : capacity_(static_cast<double>(capacity)), count_(count) {
  KVFERRY_CHECK(count > kLru && count <= kMost, "a race of too few, or too many");
}

void Race::add(std::span<const std::size_t> hits, std::size_t found, std::size_t blocks) {
  const auto length = static_cast<double>(blocks);
  const double kept =
      std::exp2(-length / (kHalfLifeInCapacities * capacity_ + kHalfLifeInRequests * length));
  const auto difference = [](std::size_t a, std::size_t b) {
    return static_cast<double>(a) - static_cast<double>(b);
  };
  blocks_ += length;
  for (std::size_t one = 0; one < count_; ++one) {
    lately_[one] = lately_[one] * kept + difference(hits[one], hits[0]);
    const double missed = difference(hits[one], found);
    missed_[one] += missed;
    missed_squares_[one] += missed * missed;
    for (std::size_t other = 0; other < count_; ++other) {
      const double more = difference(hits[one], hits[other]);
      lately_squares_[one][other] = lately_squares_[one][other] * kept + more * more;
    }
  }
  std::size_t best = leader_;
  std::size_t most_missed = 0;
  for (std::size_t one = 0; one < count_; ++one) {
    if (lately_[one] > lately_[best]) best = one;
    if (missed_[one] > missed_[most_missed]) most_missed = one;
  }
  const double sure = best == 0 ? kSureDeviationsOfFirst : kSureDeviations;
  if (more(best, leader_) > sure) leader_ = best;
  // The cache takes a while to become like another one: it stays with one that is hardly worse.
  const auto is_more = [this](std::size_t one, double part) {
    return missed_[one] > kMostMissedOfCapacity * capacity_ + part * blocks_ +
                              kLuckDeviations * std::sqrt(missed_squares_[one]);
  };
  const bool is_behind = is_more(most_missed, kMostMissed) || is_more(kLru, kMostMissedOfLru);
  const double hardly = (kMostMissedOfCapacity * capacity_ + kMostMissed * blocks_) / 2;
  if (is_behind && missed_[most_missed] - missed_[leader_] > hardly) leader_ = most_missed;
}

double Race::more(std::size_t one, std::size_t other) const {
  const double squares = lately_squares_[one][other];
  return squares > 0 ? (lately_[one] - lately_[other]) / std::sqrt(squares) : 0;
}

Race::Says Race::says() const {
  Says says{};
  for (std::size_t one = 0; one < count_; ++one) {
    says[one] = std::exp(more(one, leader_));
    if (one == kLru) continue;
    const double half = one == 0 ? kHalfASayOfFirst : kHalfASay;
    says[one] /= 1 + std::exp(-kSteepness * (more(one, kLru) - half));
  }
  says[leader_] += count_ == 2 ? kSayOfLeaderOfTwo : kSayOfLeader;
  return says;
}

}  // namespace kvferry::cache_manager
