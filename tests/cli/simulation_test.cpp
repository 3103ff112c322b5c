// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "simulate/simulation.hpp"

#include "cli/svg_checks.hpp"
#include "kvferry/cache_manager/eviction_policy.hpp"
#include "replay/generator.hpp"
#include "simulate/report.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <list>
#include <string>
#include <unordered_map>
#include <vector>

namespace kvferry::cli {
namespace {

using ipc::ErrorCode;
using testing::HasSubstr;

BlockTrace trace_of(const std::vector<std::vector<std::uint64_t>>& requests) {
  std::vector<TraceRequest> made(requests.size());
  for (std::size_t i = 0; i < requests.size(); ++i) made[i].hash_ids = requests[i];
  return number_blocks(made);
}

std::uint64_t hits(const BlockTrace& trace, std::string_view policy, std::size_t capacity) {
  const auto result = simulate(trace, policy, capacity);
  EXPECT_TRUE(result.has_value());
  return result->hits;
}

/// As the facts of traces are computed: one list, a request's blocks touched last to first.
std::uint64_t flat_lru_hits(const BlockTrace& trace, std::size_t capacity) {
  std::list<std::uint32_t> order;
  std::unordered_map<std::uint32_t, std::list<std::uint32_t>::iterator> cached;
  std::uint64_t hits = 0;
  for (const auto& request : trace.requests) {
    for (std::size_t i = 0; i < request.size() && cached.contains(request[i]); ++i) ++hits;
    for (std::size_t i = request.size(); i-- > 0;) {
      if (const auto at = cached.find(request[i]); at != cached.end()) order.erase(at->second);
      cached[request[i]] = order.insert(order.end(), request[i]);
    }
    for (; order.size() > capacity; order.pop_front()) cached.erase(order.front());
  }
  return hits;
}

// What is kept free holds nothing: that costs hits, and stores find room.
TEST(SimulationTest, EvictingAheadTradesHitsForRoom) {
  std::vector<std::vector<std::uint64_t>> requests;
  for (std::uint64_t i = 0; i < 400; ++i) requests.push_back({i % 90});
  const BlockTrace trace = trace_of(requests);
  const auto plain = simulate(trace, "lru", 100).value();
  EXPECT_EQ(plain.hits, 310U);
  EXPECT_EQ(plain.evictions, 0U);
  const auto ahead = simulate(trace, "lru", 100, {50, 200}).value();
  EXPECT_EQ(ahead.hits, 310U) << "90 blocks leave more than the low mark free";
  const auto tight = simulate(trace, "lru", 100, {110, 200}).value();
  EXPECT_LT(tight.hits, 310U);
  EXPECT_GT(tight.evictions, 0U);
  EXPECT_EQ(tight.evictions_at_need, 0U);
  const auto small = simulate(trace, "lru", 50).value();
  EXPECT_EQ(small.evictions_at_need, small.evictions);
}

TEST(SimulationTest, CountsATrace) {
  const BlockTrace trace = trace_of({{90, 7, 8}, {90, 7, 9}, {5, 7}});
  EXPECT_EQ(trace.references, 8U);
  EXPECT_EQ(trace.distinct, 5U);
  EXPECT_EQ(trace.unlimited_hits, 2U) << "of a prefix: 7 behind 5 does not count";
  EXPECT_DOUBLE_EQ(trace.unlimited_hit_rate(), 0.25);
  EXPECT_EQ(trace_of({}).unlimited_hit_rate(), 0);
}

TEST(SimulationTest, EveryPolicyFindsAllWhereAllFits) {
  const BlockTrace trace = trace_of({{1, 2, 3}, {1, 2, 4}, {1, 2, 3, 5}, {6}, {6, 7}});
  for (const auto name : cache_manager::eviction_policies()) {
    EXPECT_EQ(hits(trace, name, 7), trace.unlimited_hits) << name;
  }
  EXPECT_EQ(hits(trace, kOptimalPolicy, 7), trace.unlimited_hits);
}

TEST(SimulationTest, OptimalKeepsWhatComesBackFirst) {
  // 1 and 2 come back, 1 sooner; 3 never does.
  const BlockTrace trace = trace_of({{1}, {2}, {3}, {1}, {2}});
  EXPECT_EQ(hits(trace, kOptimalPolicy, 1), 1U);
  EXPECT_EQ(hits(trace, kOptimalPolicy, 2), 2U);
  EXPECT_EQ(hits(trace, "lru", 2), 0U);
  EXPECT_EQ(hits(trace, "lru", 3), 2U);
}

// Its first place is looked at first: what is between is worth nothing without it.
TEST(SimulationTest, OptimalTakesABlockThatComesTwiceForAsDeepAsItsFirstPlace) {
  const BlockTrace trace = trace_of({{1, 2, 1}, {1, 2, 1}});
  EXPECT_EQ(hits(trace, kOptimalPolicy, 1), 1U);
  EXPECT_EQ(hits(trace, "lru", 1), 1U);
  EXPECT_EQ(hits(trace, kOptimalPolicy, 2), 3U);
}

TEST(SimulationTest, OptimalFindsNoLessThanLruWhereBlocksComeTwiceInARequest) {
  std::uint32_t state = 1;
  const auto draw = [&state](std::uint32_t below) {
    state = state * 1664525U + 1013904223U;
    return (state >> 16U) % below;
  };
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::vector<std::uint64_t>> requests(8);
    for (auto& request : requests) {
      std::uint64_t block = 1;  // Of a path in a tree: equal ones follow equal ones.
      for (std::uint32_t length = 1 + draw(4); length > 0; --length) {
        block = 2 * block + draw(2);
        request.push_back(block);
        if (draw(5) < 2) {
          request.push_back(request[draw(static_cast<std::uint32_t>(request.size()))]);
        }
      }
    }
    const BlockTrace trace = trace_of(requests);
    for (const std::size_t capacity : {1U, 2U, 3U, 4U}) {
      ASSERT_GE(hits(trace, kOptimalPolicy, capacity), hits(trace, "lru", capacity)) << round;
    }
  }
}

TEST(SimulationTest, LruIsTheFlatOneToTheLastHit) {
  for (const std::uint64_t seed : {1ULL, 2ULL}) {
    const BlockTrace trace = number_blocks(generate_conversation(600, seed));
    for (const std::size_t capacity : {30U, 100U, 1000U, 3000U}) {
      EXPECT_EQ(hits(trace, "lru", capacity), flat_lru_hits(trace, capacity)) << capacity;
    }
  }
}

TEST(SimulationTest, NoPolicyBeatsTheOneThatKnowsTheFuture) {
  const BlockTrace trace = number_blocks(generate_conversation(1500, 3));
  for (const std::size_t capacity : {200U, 1000U, 4000U}) {
    const std::uint64_t best = hits(trace, kOptimalPolicy, capacity);
    EXPECT_LE(best, trace.unlimited_hits);
    for (const auto name : cache_manager::eviction_policies()) {
      EXPECT_LE(hits(trace, name, capacity), best) << name << " " << capacity;
    }
  }
}

// Where capacity is scarce; the seeds were not looked at when the policy was made.
TEST(SimulationTest, OursGoesATenthOfTheWayFromLruToTheOptimum) {
  double gained = 0;
  int measured = 0;
  for (const std::uint64_t seed : {101ULL, 102ULL}) {
    const BlockTrace trace = number_blocks(generate_conversation(8'000, seed));
    for (const std::size_t capacity : {trace.distinct / 100, trace.distinct / 50}) {
      const auto lru = simulate(trace, "lru", capacity);
      const auto ours = simulate(trace, cache_manager::kDefaultEvictionPolicy, capacity);
      const auto optimal = simulate(trace, kOptimalPolicy, capacity);
      ASSERT_TRUE(lru && ours && optimal);
      gained += gain(*ours, *lru, *optimal);
      ++measured;
    }
  }
  EXPECT_GT(gained / measured, 0.1);
}

TEST(SimulationTest, RefusesPoliciesThatItDoesNotKnow) {
  const auto result = simulate(trace_of({{1}}), "belady", 3);
  ASSERT_FALSE(result.has_value());
  EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(result.error().message, HasSubstr("'belady'"));
}

SimulationReport sample() {
  SimulationReport report;
  report.workload = "a <trace>";
  report.references = 1000;
  report.unlimited_hit_rate = 0.8;
  for (const std::size_t capacity : {10U, 1000U}) {
    report.results.push_back({"reuse", capacity, 1000, 300, 5, 0.1});
    report.results.push_back({"lru", capacity, 1000, 200, 5, 0.1});
    report.results.push_back({"optimal", capacity, 1000, 600, 5, 0.1});
  }
  return report;
}

TEST(SimulationReportTest, TellsHitRatesAndGain) {
  const auto told = to_json(sample());
  ASSERT_EQ(told["results"].size(), 6U);
  EXPECT_EQ(told["results"][0]["policy"], "reuse");
  EXPECT_EQ(told["results"][0]["capacity"], 10);
  EXPECT_DOUBLE_EQ(told["results"][0]["hit_rate"], 0.3);
  EXPECT_DOUBLE_EQ(told["results"][0]["gain"], 0.25);
  EXPECT_THAT(table_of(sample()), HasSubstr("1,000  0.3000  0.2000   0.6000  25 %"));
  SimulationReport without = sample();
  std::erase_if(without.results, [](const auto& result) { return result.policy == "lru"; });
  EXPECT_FALSE(to_json(without)["results"][0].contains("gain"));
  EXPECT_THAT(table_of(without), testing::Not(HasSubstr("gain")));
}

TEST(SimulationReportTest, DrawsWellFormedWhateverItShows) {
  EXPECT_EQ(test::flaw_of(draw_simulation(sample())), "");
  EXPECT_THAT(draw_simulation(sample()), HasSubstr("a &lt;trace&gt;"));
  EXPECT_THAT(draw_simulation(sample()), HasSubstr("<polyline class=\"line reuse\""));
  SimulationReport one = sample();
  one.results.resize(1);
  EXPECT_EQ(test::flaw_of(draw_simulation(one)), "");
  EXPECT_EQ(test::flaw_of(draw_simulation(SimulationReport())), "");
}

}  // namespace
}  // namespace kvferry::cli
