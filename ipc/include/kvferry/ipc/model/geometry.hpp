// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::ipc {

enum class DataType : std::uint8_t { kFp32 = 1, kFp16, kBf16, kFp8E4m3, kFp8E5m2, kInt8, kUint8 };
enum class RegionKind : std::uint8_t {
  kKey = 1,
  kValue,
  kScale,
  kLatent,
  kIndexer,
  kDraft,
  kState,
  kOther
};
/// Which blocks of a group a prefix hit of n blocks needs.
enum class HitRule : std::uint8_t {
  kFull = 1,       ///< All n.
  kSlidingWindow,  ///< The last window_blocks of the n.
  kLastState,      ///< The last one.
};
/// How an arena lays regions out. kLayerFirst: one allocation, region after region.
/// kLayerFirstMany: one allocation per region (what most engines do). kBlockFirst: one allocation,
/// all slices of a block next to each other.
enum class ArenaOrder : std::uint8_t { kLayerFirst = 1, kLayerFirstMany, kBlockFirst };

/// Limits that validation holds every geometry to, also those from messages and files.
inline constexpr std::uint32_t kMaxRanks = 256;
inline constexpr std::uint32_t kMaxGroups = 16;
inline constexpr std::uint32_t kMaxRegionsPerGroup = 4096;
inline constexpr std::uint32_t kMaxLayers = 4096;  ///< Layer numbers are below it.
inline constexpr std::uint32_t kMaxTokensPerBlock = 65536;
inline constexpr std::uint32_t kMaxBlocksPercent = 10'000;
inline constexpr std::uint32_t kMaxWindowBlocks = 1U << 20;
inline constexpr std::uint64_t kMaxRegionBlockBytes = 1ULL << 30;
inline constexpr std::size_t kMaxNameLength = 64;  ///< Names are [A-Za-z0-9._-]+.

/// Bytes of one element; 0 for a value that is no DataType.
[[nodiscard]] std::uint64_t element_bytes(DataType type) noexcept;

[[nodiscard]] std::string_view to_string(DataType type) noexcept;
[[nodiscard]] std::string_view to_string(RegionKind kind) noexcept;
[[nodiscard]] std::string_view to_string(HitRule rule) noexcept;
[[nodiscard]] std::string_view to_string(ArenaOrder order) noexcept;
[[nodiscard]] Result<ArenaOrder> parse_arena_order(std::string_view text);  ///< "layer-first" …

/// What one region holds for one block on one rank.
struct RegionSpec {
  RegionKind kind = RegionKind::kKey;
  DataType dtype = DataType::kFp16;
  std::uint32_t layer = 0;
  bool replicated = false;        ///< The same bytes on every rank: stored once per host.
  std::uint64_t block_bytes = 0;  ///< Slice of one block on one rank.
  friend bool operator==(const RegionSpec&, const RegionSpec&) = default;
  template <typename V> void visit(V& v) { v(kind, dtype, layer, replicated, block_bytes); }
};

/// Regions that share one space of block ids.
struct GroupSpec {
  std::string name;  ///< "main", "draft", "window", "state" …
  HitRule rule = HitRule::kFull;
  std::uint32_t window_blocks = 0;  ///< kSlidingWindow only.
  /// Device blocks of this group per 100 blocks of --gpu-blocks (draft layers may have more).
  std::uint32_t blocks_percent = 100;
  std::vector<RegionSpec> regions;
  friend bool operator==(const GroupSpec&, const GroupSpec&) = default;
  template <typename V> void visit(V& v) { v(name, rule, window_blocks, blocks_percent, regions); }
};

/// The shape of a model's KV cache on each of `ranks` tensor-parallel ranks. Value type.
struct Geometry {
  std::string name;
  std::uint32_t tokens_per_block = 0;
  std::uint32_t ranks = 1;
  bool key_before_value = true;  ///< K/V order inside a layer.
  std::vector<GroupSpec> groups;
  friend bool operator==(const Geometry&, const Geometry&) = default;
  template <typename V> void visit(V& v) {
    v(name, tokens_per_block, ranks, key_before_value, groups);
  }

  /// Bytes of one block of a group on one rank: replicated and sharded parts.
  [[nodiscard]] std::uint64_t replicated_bytes(GroupId group) const;
  [[nodiscard]] std::uint64_t sharded_bytes(GroupId group) const;
  /// All bytes of one block of the group as stored on the host: replicated once, shards per rank.
  [[nodiscard]] std::uint64_t host_block_bytes(GroupId group) const;

  /// Checks every field (counts, zero and overflowing sizes, duplicate group names) without trust.
  [[nodiscard]] Status validate() const;
  /// 128 bits over everything that decides how bytes are to be read and which blocks a hit needs,
  /// and the arena order; equal on every rank. The geometry's own name and block counts
  /// (blocks_percent too) are not part of it.
  [[nodiscard]] Digest fingerprint(ArenaOrder order) const;
};

/// Names of the built-in presets with a line of description each.
struct PresetInfo {
  std::string_view name;
  std::string_view description;  ///< Names the source of the numbers.
  std::uint32_t default_ranks;
};
[[nodiscard]] std::vector<PresetInfo> geometry_presets();

/// A preset by name, or a TOML file when the text ends in ".toml" (format:
/// docs/geometry.example.toml); sharded over `ranks`. Unknown names list the known ones. A head
/// count that ranks do not divide is kInvalidArgument: heads that several ranks hold copies of are
/// not described by a geometry (a region is either sharded or the same on every rank).
[[nodiscard]] Result<Geometry> load_geometry(std::string_view name_or_file, std::uint32_t ranks);

}  // namespace kvferry::ipc
