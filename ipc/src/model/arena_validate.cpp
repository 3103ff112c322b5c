// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/arena_layout.hpp"
#include "model/arena_places.hpp"

#include <cstddef>
#include <string>

namespace kvferry::ipc {
namespace {

Status check_region(const Region& region,
                    const RegionSpec& spec,
                    std::uint32_t group,
                    const std::string& name) {
  if (region.kind == spec.kind && region.layer == spec.layer && region.group == GroupId{group} &&
      region.replicated == spec.replicated && region.block_bytes == spec.block_bytes) {
    return ok();
  }
  return KVFERRY_ERROR(kGeometryMismatch,
                       "arena layout: {} is {} of layer {} in group {}, replicated {}, {} bytes; "
                       "the geometry says {} of layer {} in group {}, replicated {}, {} bytes",
                       name, to_string(region.kind), region.layer, region.group.value,
                       region.replicated, region.block_bytes, to_string(spec.kind), spec.layer,
                       group, spec.replicated, spec.block_bytes);
}

/// Order, fingerprint and counts: whether the layout is one of this geometry at all.
Status check_identity(const ArenaLayout& layout, const Geometry& geometry) {
  if (to_string(layout.order) == "invalid") {
    return KVFERRY_ERROR(kProtocol, "arena layout: order {} is none of 1 to {}",
                         static_cast<int>(layout.order), static_cast<int>(ArenaOrder::kBlockFirst));
  }
  const Digest expected = geometry.fingerprint(layout.order);
  if (layout.fingerprint != expected) {
    return KVFERRY_ERROR(kGeometryMismatch,
                         "arena layout has fingerprint {}, geometry '{}' in order {} has {}; start "
                         "both sides with the same geometry, ranks and order",
                         layout.fingerprint.hex(), geometry.name, to_string(layout.order),
                         expected.hex());
  }
  std::size_t region_count = 0;
  for (const GroupSpec& group : geometry.groups) region_count += group.regions.size();
  if (layout.groups.size() != geometry.groups.size() || layout.regions.size() != region_count) {
    return KVFERRY_ERROR(kGeometryMismatch,
                         "arena layout has {} groups and {} regions, geometry '{}' has {} and {}",
                         layout.groups.size(), layout.regions.size(), geometry.name,
                         geometry.groups.size(), region_count);
  }
  return ok();
}

}  // namespace

Status ArenaLayout::validate(const Geometry& geometry) const {
  KVFERRY_TRY(geometry.validate());
  KVFERRY_TRY(check_identity(*this, geometry));
  std::size_t next = 0;
  for (std::uint32_t g = 0; g < geometry.groups.size(); ++g) {
    for (const RegionSpec& spec : geometry.groups[g].regions) {
      KVFERRY_TRY(check_region(regions[next], spec, g, fmt::format("region {}", next)));
      ++next;
    }
  }
  return model::check_places(*this);
}

}  // namespace kvferry::ipc
