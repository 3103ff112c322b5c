// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/cache_manager/watermarks.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "replay/trace.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// What a cache of prefixes would have had of a trace, without data.
namespace kvferry::cli {

/// Of a policy that knows what comes, for comparison: a block that is never used again is not kept,
/// of others the one goes that is used again last (of equals the deeper one, by its first place in
/// the request).
inline constexpr std::string_view kOptimalPolicy = "optimal";

/// A trace's requests as blocks that are numbered from 0 in the order in which they come.
struct BlockTrace {
  std::vector<std::vector<std::uint32_t>> requests;
  std::uint32_t distinct = 0;
  std::uint64_t references = 0;
  std::uint64_t unlimited_hits = 0;  ///< Of a cache that nothing ever leaves.

  [[nodiscard]] double unlimited_hit_rate() const;
};
[[nodiscard]] BlockTrace number_blocks(const std::vector<TraceRequest>& requests);

struct SimulatedCache {
  std::string policy;
  std::size_t capacity = 0;  ///< Blocks.
  std::uint64_t references = 0;
  std::uint64_t hits = 0;  ///< Blocks found before the first one of their request that is missing.
  std::uint64_t evictions = 0;
  double seconds = 0;
  std::uint64_t evictions_at_need = 0;  ///< Those that a store had to wait for.

  [[nodiscard]] double hit_rate() const;
};

/// Request by request: hits are counted, then all blocks of it are used, and what is too much goes.
/// @param policy of cache_manager::eviction_policies(), or kOptimalPolicy; else kInvalidArgument
/// @param ahead between two requests blocks go by these marks; the optimum knows of none
/// @pre capacity > 0
[[nodiscard]] ipc::Result<SimulatedCache> simulate(const BlockTrace& trace,
                                                   std::string_view policy,
                                                   std::size_t capacity,
                                                   const cache_manager::Watermarks& ahead = {});

/// How much of the way from LRU to the optimum a policy goes; 0 where there is none to go.
[[nodiscard]] double gain(const SimulatedCache& policy,
                          const SimulatedCache& lru,
                          const SimulatedCache& optimal);

}  // namespace kvferry::cli
