// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvferry::ipc::model {

/// The order of a group's regions in a packed block, as places in `regions` (RegionSpec or Region):
/// replicated ones first, then sharded ones, each in the order given. The one definition of it.
template <typename T>
[[nodiscard]] std::vector<std::size_t> packed_order(std::span<const T> regions) {
  std::vector<std::size_t> order;
  order.reserve(regions.size());
  for (const bool replicated : {true, false}) {
    for (std::size_t i = 0; i < regions.size(); ++i) {
      if (regions[i].replicated == replicated) order.push_back(i);
    }
  }
  return order;
}

}  // namespace kvferry::ipc::model
