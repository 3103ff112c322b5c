// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "mover/lane_job.hpp"

#include <utility>

namespace kvferry::cache_manager {

ipc::Status MappedArena::make_tables(ipc::Device& device) {
  for (std::uint32_t group = 0; group < arena->layout().groups.size(); ++group) {
    auto& tables = tables_.emplace_back();
    for (const ipc::RegionSet set : {ipc::RegionSet::kSharded, ipc::RegionSet::kReplicated}) {
      // The salt of a rank is for patterns alone.
      auto regions = arena->strided(ipc::GroupId{group}, set, ipc::Rank{0});
      if (regions.empty()) continue;
      KVFERRY_ASSIGN(tables.at(set == ipc::RegionSet::kReplicated ? 1 : 0),
                     device.make_region_table(std::move(regions)));
    }
  }
  return ipc::ok();
}

}  // namespace kvferry::cache_manager
