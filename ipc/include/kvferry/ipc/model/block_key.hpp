// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvferry::ipc {

inline constexpr std::uint32_t kMostUnitBlocks = 64;

/// Identifies whose blocks may be shared: same namespace, same model (name and geometry
/// fingerprint) and the same weights. Anything that differs is a miss.
struct ModelIdentity {
  std::string name_space = "default";
  std::string model;
  Digest fingerprint;  ///< Geometry::fingerprint.
  Digest weights;      ///< Digest of the caller, or fresh random bytes per load; never a counter.
  /// A secret of the namespace, 128 random bits: without it nobody finds its blocks, nor whether
  /// they are there. All who share the namespace have the same one. Nothing: it has no secret.
  std::optional<Digest> name_space_key{};
  /// Device blocks of a store unit: what one key names, and what is stored, found and evicted as
  /// one. 1 to kMostUnitBlocks. Other units are other blocks, and so misses.
  std::uint32_t unit_blocks = 1;

  /// One digest over all of it; the root that block hashes are combined with. With a key of the
  /// namespace a keyed hash, and so a secret like that.
  [[nodiscard]] Digest root() const;
  friend bool operator==(const ModelIdentity&, const ModelIdentity&) = default;
};

/// One identity of several weights: of the shards of all ranks, or of an engine's and its workers'.
/// Those that are zero do not count; equal ones are one. Zero when all are.
[[nodiscard]] Digest combine_weights(std::span<const Digest> weights);

/// Chained hash of a block: hash(parent, tokens). The first block's parent is zero.
[[nodiscard]] Digest chain_block_hash(const Digest& parent,
                                      const void* tokens,
                                      std::size_t size_bytes);

/// What a host block is found by.
struct BlockKey {
  Digest root;   ///< ModelIdentity::root().
  Digest block;  ///< Chained block hash, or the engine's own.
  GroupId group;
  friend constexpr auto operator<=>(const BlockKey&, const BlockKey&) = default;
};

}  // namespace kvferry::ipc

template <> struct std::hash<kvferry::ipc::BlockKey> {
  std::size_t operator()(const kvferry::ipc::BlockKey& key) const noexcept {
    return static_cast<std::size_t>(key.block.low() ^ (key.root.high() * 0x9E3779B97F4A7C15ULL) ^
                                    key.group.value);
  }
};
