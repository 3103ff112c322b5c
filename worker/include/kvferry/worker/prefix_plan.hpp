// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/model/geometry.hpp"

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace kvferry::worker {

/// Where the contents of a block can be had.
enum class BlockSource : std::uint8_t { kNowhere, kHost, kDevice };

/// One block that a request needs in one group.
struct PlannedBlock {
  ipc::GroupId group;
  std::uint32_t position = 0;                  ///< In the request's prefix.
  BlockSource source = BlockSource::kNowhere;  ///< kNowhere: to be computed.
};

struct PrefixPlan {
  std::uint32_t hit_blocks = 0;      ///< Longest prefix that every group's rule accepts.
  std::uint32_t device_hits = 0;     ///< Of those: nothing to load.
  std::uint32_t host_hits = 0;       ///< Of those: some group's block comes from the host.
  std::vector<bool> hit_from_host;   ///< Per block of the hit prefix.
  std::vector<PlannedBlock> blocks;  ///< Group by group, positions ascending.
};

/// Asked at most once for each block, so that it may look at what others change meanwhile.
using SourceOf = std::function<BlockSource(ipc::GroupId group, std::uint32_t position)>;

/// What a request of `length` blocks needs, of which the first `whole` are filled with tokens: only
/// those can be the prefix of another request. A kFull group holds every block. A sliding window
/// holds the window behind the hit (to continue from), the window at the end, and the one behind
/// the last whole block, where the next turn will want to continue; a state group the last block of
/// each. Pure. @pre whole <= length
[[nodiscard]] PrefixPlan plan_prefix(std::span<const ipc::GroupSpec> groups,
                                     std::uint32_t length,
                                     std::uint32_t whole,
                                     const SourceOf& source_of);

/// An upper bound of the blocks that any such request needs in the group.
[[nodiscard]] std::uint32_t most_blocks_needed(const ipc::GroupSpec& group, std::uint32_t length);

}  // namespace kvferry::worker
