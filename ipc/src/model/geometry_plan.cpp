// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "model/geometry_plan.hpp"

#include <utility>

namespace kvferry::ipc::model {
namespace {

std::string divisors(std::uint64_t value) {
  std::string text;
  for (std::uint32_t ranks = 1; ranks <= kMaxRanks && ranks <= value; ++ranks) {
    if (value % ranks == 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", ranks);
  }
  return text;
}

Status add_key_value(const LayersPlan& plan,
                     const GeometryPlan& geometry,
                     std::uint32_t ranks,
                     std::vector<RegionSpec>& regions) {
  const KeyValuePlan& kv = *plan.key_value;
  if (kv.heads % ranks != 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: {} KV heads cannot be sharded over {} ranks (heads copied to several "
                         "ranks are not supported); use a rank count out of {}",
                         plan.origin, kv.heads, ranks, divisors(kv.heads));
  }
  const std::uint64_t vectors = std::uint64_t{kv.heads / ranks} * geometry.tokens_per_block;
  const std::uint64_t block_bytes = vectors * kv.head_dim * element_bytes(plan.dtype);
  for (std::uint32_t i = 0; i < plan.layers; ++i) {
    const std::uint32_t layer = plan.first_layer + i;
    RegionSpec first{RegionKind::kKey, plan.dtype, layer, false, block_bytes};
    RegionSpec second{RegionKind::kValue, plan.dtype, layer, false, block_bytes};
    if (!geometry.key_before_value) std::swap(first, second);
    regions.push_back(first);
    regions.push_back(second);
    if (kv.scale_dtype) {
      regions.push_back(RegionSpec{RegionKind::kScale, *kv.scale_dtype, layer, false,
                                   2 * vectors * element_bytes(*kv.scale_dtype)});
    }
  }
  return ok();
}

Status add_plain(const LayersPlan& plan,
                 const GeometryPlan& geometry,
                 std::uint32_t ranks,
                 std::vector<RegionSpec>& regions) {
  const PlainPlan& plain = plan.plain;
  const std::uint64_t whole =
      plain.bytes_per_block != 0
          ? plain.bytes_per_block
          : plain.elements_per_token * geometry.tokens_per_block * element_bytes(plan.dtype);
  const std::uint64_t unit = plain.bytes_per_block != 0 ? whole : plain.elements_per_token;
  if (!plain.replicated && unit % ranks != 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: {} {} of a {} region cannot be sharded over {} ranks; use a rank "
                         "count out of {}, or replicated = true",
                         plan.origin, unit,
                         plain.bytes_per_block != 0 ? "bytes per block" : "elements per token",
                         to_string(plain.kind), ranks, divisors(unit));
  }
  const std::uint64_t block_bytes = plain.replicated ? whole : whole / ranks;
  for (std::uint32_t i = 0; i < plan.layers; ++i) {
    regions.push_back(
        RegionSpec{plain.kind, plan.dtype, plan.first_layer + i, plain.replicated, block_bytes});
  }
  return ok();
}

}  // namespace

Result<Geometry> shard(const GeometryPlan& plan, std::uint32_t ranks) {
  if (ranks == 0 || ranks > kMaxRanks) {
    return KVFERRY_ERROR(kInvalidArgument, "geometry '{}': {} ranks, expected 1 to {}", plan.name,
                         ranks, kMaxRanks);
  }
  Geometry geometry;
  geometry.name = plan.name;
  geometry.tokens_per_block = plan.tokens_per_block;
  geometry.ranks = ranks;
  geometry.key_before_value = plan.key_before_value;
  for (const GroupPlan& group : plan.groups) {
    GroupSpec& spec = geometry.groups.emplace_back();
    spec.name = group.name;
    spec.rule = group.rule;
    spec.window_blocks = group.window_blocks;
    spec.blocks_percent = group.blocks_percent;
    for (const LayersPlan& layers : group.layers) {
      KVFERRY_TRY(layers.key_value ? add_key_value(layers, plan, ranks, spec.regions)
                                   : add_plain(layers, plan, ranks, spec.regions));
    }
  }
  KVFERRY_TRY(geometry.validate());
  return geometry;
}

}  // namespace kvferry::ipc::model
