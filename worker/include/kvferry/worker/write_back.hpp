// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/worker/device_index.hpp"
#include "kvferry/worker/write_policy.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace kvferry::worker {

/// A device block that is to be stored before it is evicted.
struct EvictedBlock {
  ipc::GroupId group;
  ipc::BlockId block;
  ipc::Digest hash;
  ipc::Digest before;  ///< Of the block that it continues.
};

struct WriteBackPlan {
  /// Shall be stored now. Whoever does it acquires them until the store has read them, so that they
  /// are not handed out before, and then calls GroupIndex::release_as_oldest().
  std::vector<EvictedBlock> stores;
  /// The room that is asked for needs a block that is not stored yet: it is there after these
  /// stores, and those under way, have ended.
  bool waits = false;
};

/// What has to be stored before so many blocks of each group can be allocated without losing
/// contents that the policy keeps. under_way: blocks of each group that are being stored for their
/// eviction, to be released as the oldest then. Whoever cannot store them, or does not want to
/// wait, allocates all the same: the device then loses them. Pure. @pre the spans have one element
/// for each group
[[nodiscard]] WriteBackPlan plan_write_back(std::span<const GroupIndex> groups,
                                            std::span<const std::uint64_t> needed,
                                            std::span<const std::uint64_t> under_way,
                                            const WritePolicy& policy);

/// Blocks of each group that are not stored and would be lost with so many allocations.
[[nodiscard]] std::uint64_t count_lost(std::span<const GroupIndex> groups,
                                       std::span<const std::uint64_t> needed,
                                       const WritePolicy& policy);

}  // namespace kvferry::worker
