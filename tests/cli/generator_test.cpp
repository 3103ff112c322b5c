// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/generator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <unordered_map>

namespace kvferry::cli {
namespace {

/// Share of block references that hit, counted up to the first miss, in a flat block LRU whose
/// blocks are touched last to first. Ids of generated requests are unique per prefix.
double lru_hit_rate(const std::vector<TraceRequest>& requests, std::size_t capacity) {
  std::list<std::uint64_t> order;
  std::unordered_map<std::uint64_t, std::list<std::uint64_t>::iterator> places;
  std::uint64_t hits = 0;
  std::uint64_t references = 0;
  for (const TraceRequest& request : requests) {
    const auto miss =
        std::find_if(request.hash_ids.begin(), request.hash_ids.end(),
                     [&](std::uint64_t id) { return places.find(id) == places.end(); });
    hits += static_cast<std::uint64_t>(miss - request.hash_ids.begin());
    references += request.hash_ids.size();
    for (auto id = request.hash_ids.rbegin(); id != request.hash_ids.rend(); ++id) {
      if (const auto found = places.find(*id); found != places.end()) order.erase(found->second);
      order.push_back(*id);
      places[*id] = std::prev(order.end());
    }
    while (order.size() > capacity) {
      places.erase(order.front());
      order.pop_front();
    }
  }
  return static_cast<double>(hits) / static_cast<double>(references);
}

double mean(const std::vector<TraceRequest>& requests, std::uint32_t TraceRequest::*field) {
  double sum = 0;
  for (const TraceRequest& request : requests) sum += request.*field;
  return sum / static_cast<double>(requests.size());
}

class GeneratorTest : public testing::TestWithParam<std::uint64_t> {
 protected:
  const std::vector<TraceRequest> requests_ =
      generate_conversation(ConversationFacts::kRequests, GetParam());
};

TEST_P(GeneratorTest, FollowsTheLengthsOfTheTrace) {
  ASSERT_EQ(requests_.size(), ConversationFacts::kRequests);
  EXPECT_NEAR(mean(requests_, &TraceRequest::input_length), ConversationFacts::kMeanInputTokens,
              0.08 * ConversationFacts::kMeanInputTokens);
  EXPECT_NEAR(mean(requests_, &TraceRequest::output_length), ConversationFacts::kMeanOutputTokens,
              0.05 * ConversationFacts::kMeanOutputTokens);
  EXPECT_NEAR(requests_.back().timestamp_ms / 1000.0, ConversationFacts::kDurationSeconds,
              0.05 * ConversationFacts::kDurationSeconds);
}

TEST_P(GeneratorTest, FollowsTheReuseOfTheTrace) {
  // The trace's own rates: 0.0445, 0.0653, 0.2116, 0.3257 and 0.3664.
  EXPECT_NEAR(lru_hit_rate(requests_, 1'000), 0.0445, 0.015);
  EXPECT_NEAR(lru_hit_rate(requests_, 3'000), 0.0653, 0.04);
  EXPECT_NEAR(lru_hit_rate(requests_, 10'000), 0.2116, 0.05);
  EXPECT_NEAR(lru_hit_rate(requests_, 30'000), 0.3257, 0.05);
  EXPECT_NEAR(lru_hit_rate(requests_, SIZE_MAX), ConversationFacts::kReuseRatio, 0.035);
}

TEST_P(GeneratorTest, KeepsToTheFormatOfTheTrace) {
  double last_ms = 0;
  for (const TraceRequest& request : requests_) {
    EXPECT_GE(request.timestamp_ms, last_ms);
    last_ms = request.timestamp_ms;
    ASSERT_EQ(request.hash_ids.size(),
              (request.input_length + kTraceBlockTokens - 1) / kTraceBlockTokens);
    EXPECT_EQ(request.hash_ids.front(), 0U);
    EXPECT_GE(request.input_length, ConversationFacts::kShortestInput);
    EXPECT_LE(request.input_length, ConversationFacts::kLongestInput);
    EXPECT_GE(request.output_length, 1U);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, GeneratorTest, testing::Values(0U, 1U, 77U));

TEST(WorkloadTest, RepeatsExactlyFromItsSeed) {
  const auto first = generate_conversation(500, 9);
  const auto again = generate_conversation(500, 9);
  const auto other = generate_conversation(500, 10);
  ASSERT_EQ(first.size(), again.size());
  bool differs = false;
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].hash_ids, again[i].hash_ids);
    EXPECT_EQ(first[i].timestamp_ms, again[i].timestamp_ms);
    differs = differs || first[i].hash_ids != other[i].hash_ids;
  }
  EXPECT_TRUE(differs);
}

TEST(WorkloadTest, AShorterRunIsTheStartOfALongerOne) {
  const auto longer = generate_conversation(300, 4);
  const auto shorter = generate_conversation(100, 4);
  ASSERT_EQ(shorter.size(), 100U);
  for (std::size_t i = 0; i < shorter.size(); ++i) {
    EXPECT_EQ(shorter[i].hash_ids, longer[i].hash_ids);
  }
}

TEST(WorkloadTest, RefusesAnUnknownWorkload) {
  const auto refused = generate_workload("coding", 10, 0);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ipc::ErrorCode::kInvalidArgument);
  EXPECT_NE(refused.error().message.find("conversation"), std::string::npos);
}

}  // namespace
}  // namespace kvferry::cli
