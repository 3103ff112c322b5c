// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "replay/generator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <queue>

namespace kvferry::cli {
namespace {

/// SplitMix64: the standard library's distributions differ between implementations.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ULL;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  /// In [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  double normal(double mean, double deviation) {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));
    return mean + deviation * radius * std::cos(2.0 * std::numbers::pi * uniform());
  }
  double log_normal(double median, double sigma) {
    return std::exp(normal(std::log(median), sigma));
  }

 private:
  std::uint64_t state_;
};

struct Session {
  std::uint32_t turn = 0;
  std::uint32_t input_length = 0;
  std::uint32_t output_length = 0;
  std::vector<std::uint64_t> hash_ids;
};

struct DueTurn {
  double time_ms = 0;
  std::uint64_t order = 0;  ///< Ties are broken by age, so that runs repeat exactly.
  Session session;
  friend bool operator>(const DueTurn& a, const DueTurn& b) {
    return a.time_ms != b.time_ms ? a.time_ms > b.time_ms : a.order > b.order;
  }
};

std::uint32_t clamp_input(double tokens) {
  return static_cast<std::uint32_t>(
      std::clamp(tokens, static_cast<double>(ConversationFacts::kShortestInput),
                 static_cast<double>(ConversationFacts::kLongestInput)));
}

/// A quarter of the sessions open with little more than the common prefix.
std::uint32_t first_input(Random& random) {
  if (random.uniform() < 0.24) return clamp_input(890 + random.uniform() * 300);
  return clamp_input(random.log_normal(7'500, 1.05));
}

std::uint32_t output_length(Random& random) {
  const double kind = random.uniform();
  if (kind < 0.18) return static_cast<std::uint32_t>(1 + random.uniform() * 59);
  if (kind < 0.98) {
    return static_cast<std::uint32_t>(std::clamp(random.normal(390, 150), 1.0, 2000.0));
  }
  return static_cast<std::uint32_t>(700 + random.uniform() * 1300);
}

/// Probability that a turn is followed by another one.
double continue_probability(const Session& session) {
  constexpr std::array kByTurn = {0.333, 0.44, 0.55, 0.64, 0.65, 0.70, 0.78, 0.78, 0.86};
  const double base = kByTurn[std::min<std::size_t>(session.turn, kByTurn.size() - 1)];
  if (session.turn > 0) return base;
  return base * (session.input_length < 2048 ? 0.57 : 1.07);
}

/// The next prompt of a session: mostly the last prompt, its answer and a few words; sometimes an
/// edited one that shares only a part of its blocks.
void continue_session(Session& session, Random& random, std::size_t& kept_blocks) {
  std::uint32_t input = 0;
  if (random.uniform() < 0.15) {
    const double share = random.uniform();
    kept_blocks = std::max<std::size_t>(
        1, static_cast<std::size_t>(static_cast<double>(session.hash_ids.size()) * share * share));
    input = std::max(first_input(random),
                     clamp_input(static_cast<double>(kept_blocks) * kTraceBlockTokens + 1));
  } else {
    kept_blocks = session.input_length / kTraceBlockTokens;
    const double added =
        random.uniform() < 0.72 ? random.uniform() * 40 : random.log_normal(3'000, 1.1);
    input = clamp_input(session.input_length + session.output_length + added);
  }
  kept_blocks = std::min<std::size_t>(kept_blocks, input / kTraceBlockTokens);
  session.input_length = input;
  ++session.turn;
}

}  // namespace

std::vector<TraceRequest> generate_conversation(std::uint64_t requests, std::uint64_t seed) {
  constexpr double kMeanGapMs = ConversationFacts::kDurationSeconds * 1000.0 /
                                static_cast<double>(ConversationFacts::kRequests);
  constexpr double kClockStepMs = 3'000;  // The trace's own resolution.
  constexpr double kShortestTurnMs = 10'000;
  Random random(seed);
  std::priority_queue<DueTurn, std::vector<DueTurn>, std::greater<>> due;
  std::vector<TraceRequest> made;
  made.reserve(requests);
  std::uint64_t next_id = 1;
  std::uint64_t next_order = 0;
  double now_ms = 0;
  while (made.size() < requests) {
    now_ms -= std::log(1.0 - random.uniform()) * kMeanGapMs;
    Session session;
    std::size_t kept_blocks = 1;
    if (!due.empty() && due.top().time_ms <= now_ms) {
      session = due.top().session;
      due.pop();
      continue_session(session, random, kept_blocks);
    } else {
      session.hash_ids = {0};  // What every prompt of the service starts with.
      session.input_length = first_input(random);
    }
    const std::size_t blocks =
        (session.input_length + kTraceBlockTokens - 1) / std::size_t{kTraceBlockTokens};
    session.hash_ids.resize(std::min(kept_blocks, blocks));
    while (session.hash_ids.size() < blocks) session.hash_ids.push_back(next_id++);
    session.output_length = output_length(random);
    made.push_back(TraceRequest{std::floor(now_ms / kClockStepMs) * kClockStepMs,
                                session.input_length, session.output_length, session.hash_ids});
    if (random.uniform() < continue_probability(session)) {
      const double wait_ms = std::max(kShortestTurnMs, random.log_normal(125'000, 1.05));
      due.push(DueTurn{now_ms + wait_ms, next_order++, std::move(session)});
    }
  }
  return made;
}

ipc::Result<std::vector<TraceRequest>> generate_workload(std::string_view name,
                                                         std::uint64_t requests,
                                                         std::uint64_t seed) {
  if (name == "conversation") return generate_conversation(requests, seed);
  return KVFERRY_ERROR(kInvalidArgument, "workload '{}' is unknown; known: conversation", name);
}

}  // namespace kvferry::cli
