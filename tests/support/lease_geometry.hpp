// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/model/arena_layout.hpp"
#include "kvferry/ipc/model/geometry.hpp"

#include <cstdint>

namespace kvferry::test {

/// A small model: K and V of each layer, 4 KiB per block.
[[nodiscard]] inline ipc::Geometry small_geometry(std::uint32_t layers, std::uint32_t ranks) {
  ipc::Geometry geometry;
  geometry.name = "small";
  geometry.tokens_per_block = 16;
  geometry.ranks = ranks;
  ipc::GroupSpec group;
  group.name = "main";
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    for (const auto kind : {ipc::RegionKind::kKey, ipc::RegionKind::kValue}) {
      ipc::RegionSpec region;
      region.kind = kind;
      region.layer = layer;
      region.block_bytes = 4096;
      group.regions.push_back(region);
    }
  }
  geometry.groups.push_back(group);
  return geometry;
}

[[nodiscard]] inline ipc::ArenaLayout small_layout(const ipc::Geometry& geometry,
                                                   ipc::ArenaOrder order) {
  ipc::ArenaOptions options;
  options.order = order;
  options.gpu_blocks = 64;
  auto layout = ipc::plan_arena(geometry, options);
  if (!layout) throw ipc::Exception(layout.error());
  return std::move(layout).value();
}

}  // namespace kvferry::test
