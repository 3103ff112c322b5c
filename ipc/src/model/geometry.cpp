// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/model/geometry.hpp"

#include "model/canonical.hpp"

#include <algorithm>

namespace kvferry::ipc {
namespace {

bool is_name(std::string_view name) {
  return !name.empty() && name.size() <= kMaxNameLength &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '.' || c == '_' || c == '-';
         });
}

/// A name from outside, fit for a log line: cut, and without control bytes.
std::string printable(std::string_view name) {
  std::string text;
  for (const char c : name.substr(0, kMaxNameLength)) text += c >= ' ' && c <= '~' ? c : '?';
  return text + (name.size() > kMaxNameLength ? "..." : "");
}

Status check_range(std::string_view where,
                   std::string_view field,
                   std::uint64_t value,
                   std::uint64_t low,
                   std::uint64_t high) {
  if (value >= low && value <= high) return ok();
  return KVFERRY_ERROR(kInvalidArgument, "{}: {} is {}, expected {} to {}", where, field, value,
                       low, high);
}

Status check_name(std::string_view where, std::string_view name) {
  if (is_name(name)) return ok();
  return KVFERRY_ERROR(kInvalidArgument,
                       "{}: name '{}' ({} bytes) is not 1 to {} characters of A-Z a-z 0-9 . _ -",
                       where, printable(name), name.size(), kMaxNameLength);
}

Status check_region(std::string_view where, const RegionSpec& region) {
  if (to_string(region.kind) == "invalid") {
    return KVFERRY_ERROR(kInvalidArgument, "{}: kind {} is none of 1 to {}", where,
                         static_cast<int>(region.kind), static_cast<int>(RegionKind::kOther));
  }
  const std::uint64_t element = element_bytes(region.dtype);
  if (element == 0) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: dtype {} is none of 1 to {}", where,
                         static_cast<int>(region.dtype), static_cast<int>(DataType::kUint8));
  }
  KVFERRY_TRY(check_range(where, "layer", region.layer, 0, kMaxLayers - 1));
  KVFERRY_TRY(check_range(where, "block_bytes", region.block_bytes, 1, kMaxRegionBlockBytes));
  if (region.block_bytes % element != 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: block_bytes {} is no multiple of the {} bytes of dtype {}", where,
                         region.block_bytes, element, to_string(region.dtype));
  }
  return ok();
}

Status check_group(std::string_view geometry_name, std::size_t index, const GroupSpec& group) {
  const std::string where =
      fmt::format("geometry '{}', group {} '{}'", geometry_name, index, printable(group.name));
  KVFERRY_TRY(check_name(where, group.name));
  switch (group.rule) {
    case HitRule::kSlidingWindow:
      KVFERRY_TRY(check_range(where, "window_blocks", group.window_blocks, 1, kMaxWindowBlocks));
      break;
    case HitRule::kFull:
    case HitRule::kLastState:
      if (group.window_blocks != 0) {
        return KVFERRY_ERROR(kInvalidArgument,
                             "{}: window_blocks is {} with rule {}; only sliding-window has one",
                             where, group.window_blocks, to_string(group.rule));
      }
      break;
    default:
      return KVFERRY_ERROR(kInvalidArgument, "{}: rule {} is none of 1 to {}", where,
                           static_cast<int>(group.rule), static_cast<int>(HitRule::kLastState));
  }
  KVFERRY_TRY(check_range(where, "blocks_percent", group.blocks_percent, 1, kMaxBlocksPercent));
  KVFERRY_TRY(check_range(where, "region count", group.regions.size(), 1, kMaxRegionsPerGroup));
  for (std::size_t i = 0; i < group.regions.size(); ++i) {
    KVFERRY_TRY(check_region(fmt::format("{}, region {}", where, i), group.regions[i]));
  }
  return ok();
}

const GroupSpec& group_of(const Geometry& geometry, GroupId group) {
  KVFERRY_CHECK(group.value < geometry.groups.size(),
                fmt::format("geometry '{}' has {} groups, asked for group {}", geometry.name,
                            geometry.groups.size(), group.value));
  return geometry.groups[group.value];
}

std::uint64_t sum_bytes(const GroupSpec& group, bool replicated) {
  std::uint64_t sum = 0;
  for (const RegionSpec& region : group.regions) {
    if (region.replicated == replicated) sum += region.block_bytes;
  }
  return sum;
}

}  // namespace

std::uint64_t Geometry::replicated_bytes(GroupId group) const {
  return sum_bytes(group_of(*this, group), true);
}

std::uint64_t Geometry::sharded_bytes(GroupId group) const {
  return sum_bytes(group_of(*this, group), false);
}

std::uint64_t Geometry::host_block_bytes(GroupId group) const {
  return replicated_bytes(group) + ranks * sharded_bytes(group);
}

Status Geometry::validate() const {
  KVFERRY_TRY(check_name("geometry", name));
  const std::string where = fmt::format("geometry '{}'", name);
  KVFERRY_TRY(check_range(where, "tokens_per_block", tokens_per_block, 1, kMaxTokensPerBlock));
  KVFERRY_TRY(check_range(where, "ranks", ranks, 1, kMaxRanks));
  KVFERRY_TRY(check_range(where, "group count", groups.size(), 1, kMaxGroups));
  for (std::size_t i = 0; i < groups.size(); ++i) {
    KVFERRY_TRY(check_group(name, i, groups[i]));
    for (std::size_t j = 0; j < i; ++j) {
      if (groups[i].name == groups[j].name) {
        return KVFERRY_ERROR(kInvalidArgument,
                             "{}: groups {} and {} are both named '{}'; rename one", where, j, i,
                             groups[i].name);
      }
    }
  }
  return ok();
}

Digest Geometry::fingerprint(ArenaOrder order) const {
  model::Canonical canonical("kvferry geometry 1");
  canonical.number(static_cast<std::uint64_t>(order));
  canonical.number(tokens_per_block);
  canonical.number(ranks);
  canonical.number(key_before_value ? 1 : 0);
  canonical.number(groups.size());
  for (const GroupSpec& group : groups) {
    canonical.text(group.name);
    canonical.number(static_cast<std::uint64_t>(group.rule));
    canonical.number(group.window_blocks);
    canonical.number(group.regions.size());
    for (const RegionSpec& region : group.regions) {
      canonical.number(static_cast<std::uint64_t>(region.kind));
      canonical.number(static_cast<std::uint64_t>(region.dtype));
      canonical.number(region.layer);
      canonical.number(region.replicated ? 1 : 0);
      canonical.number(region.block_bytes);
    }
  }
  return canonical.digest();
}

}  // namespace kvferry::ipc
