// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/arena_use.hpp"

#include <algorithm>

namespace kvferry::worker {

using ipc::RegionSet;

std::vector<kernels::StridedRegion> GroupView::regions(RegionSet set,
                                                       const ipc::LayerRange& range) const {
  std::vector<kernels::StridedRegion> part;
  if (table(set) == nullptr) return part;
  const auto all = table(set)->regions();
  std::uint64_t packed_offset = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!range.contains(layers[index(set)][i])) continue;
    part.push_back(all[i]);
    part.back().packed_offset = packed_offset;
    packed_offset += all[i].block_bytes;
  }
  return part;
}

std::uint64_t GroupView::packed(RegionSet set, const ipc::LayerRange& range) const {
  std::uint64_t bytes = 0;
  for (const kernels::StridedRegion& region : regions(set, range)) bytes += region.block_bytes;
  return bytes;
}

std::uint32_t MappedArena::layer_count() const noexcept {
  std::uint32_t count = 0;
  for (const GroupView& group : groups) {
    for (const std::uint32_t layer : group.layers[GroupView::index(RegionSet::kAll)]) {
      count = std::max(count, layer + 1);
    }
  }
  return count;
}

}  // namespace kvferry::worker
