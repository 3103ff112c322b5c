// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cstdint>
#include <string_view>

namespace kvferry::cache_manager {

/// Eviction ahead of need: once less than `low` of the host pool is free for a kind of blocks that
/// is being stored, blocks go beside other work until `high` is, so that a store finds room. What
/// is kept free holds no blocks: it costs the hits of a pool that is so much smaller.
struct Watermarks {
  static constexpr std::uint32_t kMost = 500;

  std::uint32_t low_permille = 0;  ///< 0: off, stores evict themselves what they need.
  std::uint32_t high_permille = 0;

  [[nodiscard]] bool is_on() const noexcept { return low_permille > 0; }
  /// kInvalidArgument but for 0 < low <= high <= kMost, or both 0.
  [[nodiscard]] ipc::Status check() const;
  [[nodiscard]] std::uint64_t low_of(std::uint64_t whole) const noexcept {
    return part_of(whole, low_permille);
  }
  [[nodiscard]] std::uint64_t high_of(std::uint64_t whole) const noexcept {
    return part_of(whole, high_permille);
  }
  friend bool operator==(const Watermarks&, const Watermarks&) = default;

 private:
  [[nodiscard]] static std::uint64_t part_of(std::uint64_t whole, std::uint32_t permille) noexcept {
    constexpr std::uint64_t kThousand = 1000;
    return whole / kThousand * permille + whole % kThousand * permille / kThousand;
  }
};

/// "LOW:HIGH" in percent of the pool, each with or without a sign: "1:2", "0.5%:1%".
/// kInvalidArgument.
[[nodiscard]] ipc::Result<Watermarks> parse_watermarks(std::string_view text);

}  // namespace kvferry::cache_manager
