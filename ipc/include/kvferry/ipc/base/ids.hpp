// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace kvferry::ipc {

/// An integer that cannot be mixed up with another kind of id.
template <typename Tag, typename Int> struct Id {
  using value_type = Int;
  Int value{};
  friend constexpr auto operator<=>(const Id&, const Id&) = default;
};

using Rank = Id<struct RankTag, std::uint32_t>;      ///< Tensor-parallel rank, 0-based.
using GroupId = Id<struct GroupTag, std::uint32_t>;  ///< Index into Geometry::groups.
using BlockId = Id<struct BlockTag, std::uint32_t>;  ///< Device block index within a group.
using Epoch = Id<struct EpochTag, std::uint64_t>;    ///< Arena generation; 0 is "none".
using LeaseId = Id<struct LeaseTag, std::uint64_t>;  ///< Strictly increasing in a session; 0 none.
using JobId = Id<struct JobTag, std::uint64_t>;      ///< Unique per manager life.
using RequestId = Id<struct RequestTag, std::uint64_t>;  ///< Chosen by the requester, for retries.

/// 128 bits: session nonces, incarnations, weights identities, block hashes, fingerprints.
struct Digest {
  std::array<std::uint8_t, 16> bytes{};

  /// Fresh bytes from the kernel's random source.
  [[nodiscard]] static Digest random();
  [[nodiscard]] static Result<Digest> from_hex(std::string_view hex);
  [[nodiscard]] static Digest from_words(std::uint64_t high, std::uint64_t low) noexcept;
  /// XXH3-128 of the bytes with a seed; not for hostile namespaces, which use a keyed hash.
  [[nodiscard]] static Digest hash(const void* data, std::size_t size, std::uint64_t seed = 0);

  [[nodiscard]] std::string hex() const;
  [[nodiscard]] std::uint64_t high() const noexcept;
  [[nodiscard]] std::uint64_t low() const noexcept;
  [[nodiscard]] bool is_zero() const noexcept { return *this == Digest{}; }
  friend constexpr auto operator<=>(const Digest&, const Digest&) = default;
};

using SessionId = Digest;      ///< One owner lifetime.
using IncarnationId = Digest;  ///< One life of any process of ours.

}  // namespace kvferry::ipc

template <typename Tag, typename Int> struct std::hash<kvferry::ipc::Id<Tag, Int>> {
  std::size_t operator()(const kvferry::ipc::Id<Tag, Int>& id) const noexcept {
    return std::hash<Int>{}(id.value);
  }
};

template <> struct std::hash<kvferry::ipc::Digest> {
  std::size_t operator()(const kvferry::ipc::Digest& digest) const noexcept {
    return static_cast<std::size_t>(digest.low());
  }
};
