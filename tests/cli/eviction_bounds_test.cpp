// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What the default policy promises on traffic that nobody made it for: to be about as good as the
// best of the others, and never much worse than LRU. The seeds were not looked at when it was made.
#include "kvferry/cache_manager/eviction_policy.hpp"
#include "simulate/simulation.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

namespace kvferry::cli {
namespace {

constexpr double kBelowBest = 0.005;
/// Of sessions that go on by chance, which say little: docs/performance.md.
constexpr double kBelowBestBySessions = 0.015;
constexpr double kBelowLru = 0.01;

using Blocks = std::vector<std::uint64_t>;

class Maker {
 public:
  explicit Maker(std::uint64_t seed) : random_(seed) {}

  std::size_t below(std::size_t count) { return random_() % count; }
  /// At least 1.
  std::size_t about(double mean) {
    const double part = (static_cast<double>(random_() >> 11U) + 1) / 0x1.0p53;
    return 1 + static_cast<std::size_t>(-std::log(part) * mean);
  }
  void append(Blocks& blocks, std::size_t count) {
    while (count-- > 0) blocks.push_back(next_++);
  }
  Blocks fresh(std::size_t count) {
    Blocks blocks;
    append(blocks, count);
    return blocks;
  }

 private:
  std::mt19937_64 random_;
  std::uint64_t next_ = 0;
};

BlockTrace numbered(const std::vector<Blocks>& requests) {
  std::vector<TraceRequest> made(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) made[i].hash_ids = requests[i];
  return number_blocks(made);
}

struct Session {
  Blocks told;
  std::size_t left = 0;  ///< Requests.
};

/// Whose turn it is, by chance: a new one where the last one of its place is over.
Session& any_of(std::vector<Session>& open, Maker& make, double blocks, double requests) {
  Session& one = open[make.below(open.size())];
  if (one.left == 0) one = {make.fresh(make.about(blocks)), make.about(requests)};
  return one;
}

/// Sessions of which few are open; each is busy for some requests, then another one is.
BlockTrace bursts(std::uint64_t seed) {
  Maker make(seed);
  std::vector<Session> open(25);
  std::vector<Blocks> requests;
  while (requests.size() < 3'000) {
    Session& busy = any_of(open, make, 14, 12);
    for (std::size_t left = std::min(busy.left, 1 + make.below(6)); left > 0; --left, --busy.left) {
      requests.push_back(busy.told);
      make.append(requests.back(), make.below(2));
    }
  }
  return numbered(requests);
}

/// Turn after turn in small blocks, of sessions that go on by chance.
BlockTrace long_sessions(std::uint64_t seed) {
  Maker make(seed);
  std::vector<Session> open(40);
  std::vector<Blocks> requests;
  while (requests.size() < 1'500) {
    Session& one = any_of(open, make, 30, 30);
    make.append(one.told, make.about(5));
    requests.push_back(one.told);
    --one.left;
  }
  return numbered(requests);
}

/// Documents in turn, with questions of their own.
BlockTrace loop(std::uint64_t seed) {
  Maker make(seed);
  std::vector<Blocks> documents(90);
  for (Blocks& document : documents) document = make.fresh(make.about(12));
  std::vector<Blocks> requests;
  for (std::size_t i = 0; i < 2'000; ++i) {
    requests.push_back(documents[i % documents.size()]);
    make.append(requests.back(), 1);
  }
  return numbered(requests);
}

/// Documents of which some are asked about more often, between ones that nobody asks about again.
BlockTrace scans_between(std::uint64_t seed) {
  Maker make(seed);
  std::vector<Blocks> documents(150);
  for (Blocks& document : documents) document = make.fresh(make.about(8));
  std::vector<Blocks> requests;
  while (requests.size() < 3'000) {
    if (make.below(3) == 0) {
      requests.push_back(make.fresh(make.about(8)));
    } else {
      requests.push_back(documents[make.below(1 + make.below(documents.size()))]);
    }
  }
  return numbered(requests);
}

/// Prompts of which each is used in some shuffled passes; then come new ones.
std::vector<Blocks> epochs(Maker& make, std::size_t prompts, std::size_t count) {
  std::vector<Blocks> requests;
  while (requests.size() < count) {
    std::vector<Blocks> batch(prompts);
    for (Blocks& prompt : batch) prompt = make.fresh(make.about(10));
    for (int pass = 0; pass < 4; ++pass) {
      for (std::size_t i = batch.size(); i > 1; --i) std::swap(batch[i - 1], batch[make.below(i)]);
      requests.insert(requests.end(), batch.begin(), batch.end());
    }
  }
  return requests;
}

/// A loop, and between its documents others, of which some are popular for a while.
BlockTrace loop_beside_phases(std::uint64_t seed) {
  Maker make(seed);
  std::vector<Blocks> documents(60);
  for (Blocks& document : documents) document = make.fresh(make.about(12));
  std::vector<Blocks> popular;
  std::vector<Blocks> requests;
  for (std::size_t i = 0; i < 4'000; ++i) {
    if (i % 700 == 0) {
      popular.assign(200, {});
      for (Blocks& document : popular) document = make.fresh(make.about(6));
    }
    requests.push_back(i % 2 == 0 ? documents[i / 2 % documents.size()]
                                  : popular[make.below(1 + make.below(popular.size()))]);
  }
  return numbered(requests);
}

/// Long documents of which some are open; each is asked about some times, by chance.
BlockTrace readings(std::uint64_t seed) {
  Maker make(seed);
  std::vector<Session> open(60);
  std::vector<Blocks> requests;
  while (requests.size() < 2'500) {
    Session& one = any_of(open, make, 50, 8);
    requests.push_back(one.told);
    make.append(requests.back(), 1 + make.below(2));
    --one.left;
  }
  return numbered(requests);
}

double hit_rate(const BlockTrace& trace, std::string_view policy, std::size_t capacity) {
  const auto result = simulate(trace, policy, capacity);
  EXPECT_TRUE(result.has_value());
  return result->hit_rate();
}

void expect_bounds(const BlockTrace& trace,
                   const std::vector<double>& parts,
                   double below_best = kBelowBest) {
  for (const double part : parts) {
    const auto capacity = std::max<std::size_t>(1, static_cast<std::size_t>(part * trace.distinct));
    const double ours = hit_rate(trace, cache_manager::kDefaultEvictionPolicy, capacity);
    EXPECT_GE(ours, hit_rate(trace, "lru", capacity) - kBelowLru) << capacity << " blocks";
    for (const auto name : cache_manager::eviction_policies()) {
      EXPECT_GE(ours, hit_rate(trace, name, capacity) - below_best)
          << name << " does better with " << capacity << " blocks";
    }
  }
}

TEST(EvictionBoundsTest, HoldInACacheOfARequestOrTwo) {
  expect_bounds(bursts(7001), {0.002, 0.005, 0.01, 0.05});
}

TEST(EvictionBoundsTest, HoldForShortTracesOfLongSessions) {
  expect_bounds(long_sessions(7002), {0.01, 0.03, 0.08, 0.2}, kBelowBestBySessions);
}

TEST(EvictionBoundsTest, HoldForALoopThatIsALittleTooLarge) {
  expect_bounds(loop(7003), {0.05, 0.2, 0.35, 0.5});
}

TEST(EvictionBoundsTest, HoldWhereSomeIsPopularAndSomeNeverComesBack) {
  expect_bounds(scans_between(7004), {0.005, 0.02, 0.08, 0.2});
}

TEST(EvictionBoundsTest, HoldWhereACacheJustHoldsThePromptsOfAnEpoch) {
  for (const std::uint64_t seed : {7006U, 7007U}) {
    Maker make(seed);
    expect_bounds(numbered(epochs(make, 128, 4'000)), {0.06, 0.15, 0.2, 0.3});
  }
}

TEST(EvictionBoundsTest, HoldForALoopBesideWhatIsPopularForAWhile) {
  expect_bounds(loop_beside_phases(7008), {0.02, 0.08, 0.15, 0.25, 0.35});
}

// Of twelve seeds those with which following one policy at a time lost 1.0 to 2.1 points to LRU.
TEST(EvictionBoundsTest, HoldForQuestionsAboutLongDocuments) {
  for (const std::uint64_t seed : {7012U, 7017U, 7019U}) {
    expect_bounds(readings(seed), {0.02, 0.05}, kBelowBestBySessions);
  }
}

TEST(EvictionBoundsTest, HoldWhereEverythingFits) { expect_bounds(long_sessions(7005), {1}); }

}  // namespace
}  // namespace kvferry::cli
