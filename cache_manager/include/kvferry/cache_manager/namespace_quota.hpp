// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

/// What namespaces may have of the host pool.
namespace kvferry::cache_manager {

/// A part of the host pool: so many bytes, or so much of it.
struct PoolPart {
  std::uint64_t bytes = 0;
  std::uint32_t permille = 0;  ///< Instead of bytes, where those are 0.

  [[nodiscard]] std::uint64_t of(std::uint64_t pool_bytes) const noexcept;
  /// As it is written: "25%", "12.5%", "2.00 GiB".
  [[nodiscard]] std::string to_string() const;
  friend bool operator==(const PoolPart&, const PoolPart&) = default;
};
inline constexpr std::uint32_t kWholePool = 1000;

struct NamespaceQuota {
  /// While it has no more than that, nothing that others store evicts blocks of it; but where
  /// nothing else can go, a namespace within its own share takes of one that has a larger part of
  /// its (docs/adr/0012-tenants-of-one-pool.md).
  PoolPart soft{0, 0};
  /// It never has more than that.
  PoolPart hard{0, kWholePool};
  friend bool operator==(const NamespaceQuota&, const NamespaceQuota&) = default;
};

struct NamespaceQuotas {
  std::map<std::string, NamespaceQuota> named;
  /// Of each namespace that is not named; nothing: those have no share, no limit, and are one to
  /// eviction.
  std::optional<NamespaceQuota> others;

  [[nodiscard]] bool empty() const noexcept { return named.empty() && !others; }
  /// Whether a pool of that size can hold to them: kInvalidArgument where a soft share is above its
  /// hard limit, a limit is less than 4 KiB or above the pool, the soft shares of those named are
  /// more than the pool, or a name is one that clients cannot have.
  [[nodiscard]] ipc::Status check(std::uint64_t pool_bytes) const;
};

/// "SOFT:HARD", each a size ("512MiB") or a percentage of the pool ("12.5%"); "0" or nothing before
/// the colon: no share, nothing behind it: no limit. kInvalidArgument.
[[nodiscard]] ipc::Result<NamespaceQuota> parse_namespace_quota(std::string_view text);
/// "NAME=SOFT:HARD".
[[nodiscard]] ipc::Result<std::pair<std::string, NamespaceQuota>> parse_named_quota(
    std::string_view text);

}  // namespace kvferry::cache_manager
