// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/write_back.hpp"

#include "kvferry/ipc/base/check.hpp"

#include <algorithm>

namespace kvferry::worker {
namespace {

/// Of those that the next `count` allocations would forget, the blocks to be stored before.
std::vector<EvictedBlock> unstored_victims(const GroupIndex& index,
                                           ipc::GroupId group,
                                           std::uint64_t count,
                                           const WritePolicy& policy) {
  std::vector<EvictedBlock> found;
  for (const ipc::BlockId block : index.next_victims(count)) {
    if (index.is_stored(block)) continue;
    const GroupIndex::Contents contents = index.contents(block);
    if (!policy.on_evicting(group, contents.hash)) continue;
    found.push_back({group, block, contents.hash, contents.before});
  }
  return found;
}

}  // namespace

WriteBackPlan plan_write_back(std::span<const GroupIndex> groups,
                              std::span<const std::uint64_t> needed,
                              std::span<const std::uint64_t> under_way,
                              const WritePolicy& policy) {
  KVFERRY_CHECK(groups.size() == needed.size() && groups.size() == under_way.size(),
                "write-back is planned for other groups than there are");
  WriteBackPlan plan;
  if (policy.mode() != WriteMode::kWriteBack) return plan;  // Nothing is kept from eviction.
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    const ipc::GroupId group{g};
    if (unstored_victims(groups[g], group, needed[g], policy).empty()) {
      // What is under way is no victim: it is in use. Without it there may be too few.
      plan.waits = plan.waits || (needed[g] > groups[g].available() && under_way[g] > 0);
      continue;
    }
    plan.waits = true;
    // Those under way come back as the first victims: only what goes beyond them is stored, too.
    const std::uint64_t beyond = needed[g] - std::min(needed[g], under_way[g]);
    const auto more = unstored_victims(groups[g], group, beyond, policy);
    plan.stores.insert(plan.stores.end(), more.begin(), more.end());
  }
  return plan;
}

std::uint64_t count_lost(std::span<const GroupIndex> groups,
                         std::span<const std::uint64_t> needed,
                         const WritePolicy& policy) {
  std::uint64_t lost = 0;
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    lost += unstored_victims(groups[g], ipc::GroupId{g}, needed[g], policy).size();
  }
  return lost;
}

}  // namespace kvferry::worker
