// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvferry::cli {

/// Numbers that look random and repeat exactly from their seed (splitmix64): no library's
/// distributions, which differ between libraries.
class Mix {
 public:
  explicit constexpr Mix(std::uint64_t seed) noexcept : state_(seed) {}

  constexpr std::uint64_t next() noexcept {
    state_ += 0x9E3779B97F4A7C15ULL;
    std::uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27U)) * 0x94D049BB133111EBULL;
    return mixed ^ (mixed >> 31U);
  }
  /// Of [0, bound). @pre bound > 0.
  constexpr std::uint32_t below(std::uint32_t bound) noexcept {
    return static_cast<std::uint32_t>((next() >> 32U) * bound >> 32U);
  }

 private:
  std::uint64_t state_;
};

}  // namespace kvferry::cli
