// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/model/geometry.hpp"

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// A model's cache in the terms of its configuration (layers, heads), before it is sharded: what
/// presets and geometry files are written in.
namespace kvferry::ipc::model {

/// Keys and values of a run of layers.
struct KeyValuePlan {
  std::uint32_t heads = 0;  ///< KV heads over all ranks.
  std::uint32_t head_dim = 0;
  std::optional<DataType> scale_dtype;  ///< One scale per token and head, K and V in one region.
};

/// Any other region, one per layer.
struct PlainPlan {
  RegionKind kind = RegionKind::kOther;
  bool replicated = false;
  std::uint64_t elements_per_token = 0;  ///< Over all ranks, unless replicated.
  std::uint64_t bytes_per_block = 0;     ///< Instead of elements_per_token.
};

struct LayersPlan {
  std::string origin;  ///< Where it was written: "file.toml:12", for errors.
  std::uint32_t first_layer = 0;
  std::uint32_t layers = 0;
  DataType dtype = DataType::kFp16;
  std::optional<KeyValuePlan> key_value;
  PlainPlan plain;  ///< When key_value is empty.
};

struct GroupPlan {
  std::string name;
  HitRule rule = HitRule::kFull;
  std::uint32_t window_blocks = 0;
  std::uint32_t blocks_percent = 100;
  std::vector<LayersPlan> layers;
};

struct GeometryPlan {
  std::string name;
  std::uint32_t tokens_per_block = 0;
  bool key_before_value = true;
  std::vector<GroupPlan> groups;
};

/// Shards the plan over ranks and validates the outcome.
[[nodiscard]] Result<Geometry> shard(const GeometryPlan& plan, std::uint32_t ranks);

[[nodiscard]] Result<GeometryPlan> read_geometry_file(const std::filesystem::path& path);
/// Empty when there is no such preset.
[[nodiscard]] std::optional<GeometryPlan> find_preset(std::string_view name);

[[nodiscard]] Result<DataType> parse_data_type(std::string_view text);
[[nodiscard]] Result<RegionKind> parse_region_kind(std::string_view text);
[[nodiscard]] Result<HitRule> parse_hit_rule(std::string_view text);

}  // namespace kvferry::ipc::model
