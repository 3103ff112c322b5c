// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "replay/trace.hpp"

#include <cstdint>
#include <string_view>
#include <vector>

namespace kvferry::cli {

/// Facts of the public conversation trace that the Mooncake project released with its FAST'25
/// paper ("Mooncake: Trading More Storage for Less Computation"), which the generator follows:
/// 12,031 requests in 3,537 s, 512-token blocks, a mean input of 12,035 tokens and a mean output of
/// 343, one block that every request starts with, and 36.6 % of all block references reusable with
/// unlimited capacity. Counted from the trace: 61 % of the requests open a new session; the next
/// turn of a session comes 125 s later (median), 90 % within 8 minutes; 85 % of the next turns keep
/// the whole previous prompt; a third of the first turns are continued, 44 % of the second ones and
/// 65 % from the fourth on.
struct ConversationFacts {
  static constexpr std::uint64_t kRequests = 12'031;
  static constexpr double kDurationSeconds = 3'537.0;
  static constexpr double kMeanInputTokens = 12'035.0;
  static constexpr double kMeanOutputTokens = 343.0;
  static constexpr double kReuseRatio = 0.3664;
  static constexpr std::uint32_t kShortestInput = 891;
  static constexpr std::uint32_t kLongestInput = 126'195;
};

/// Requests in order of time with the lengths, the prefix sharing and the reuse gaps above. The
/// same seed gives the same requests.
[[nodiscard]] std::vector<TraceRequest> generate_conversation(std::uint64_t requests,
                                                              std::uint64_t seed);

/// Known workloads by name; anything else is kInvalidArgument and lists them.
[[nodiscard]] ipc::Result<std::vector<TraceRequest>> generate_workload(std::string_view name,
                                                                       std::uint64_t requests,
                                                                       std::uint64_t seed);

}  // namespace kvferry::cli
