// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

/// What the reference model is fed with, and what its output means. Integers all the way, so that
/// runs can be compared bit by bit, on whatever device they ran.
namespace kvferry::worker {

inline constexpr std::uint32_t kVocabulary = 32'000;

namespace detail {
constexpr std::uint64_t mixed(std::uint64_t x) noexcept {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ULL;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}
}  // namespace detail

/// Of the token behind the one whose input was `before` (0: the first one). It stands for the
/// hidden state: keys and values depend on the whole prefix, so that a block that is reused behind
/// another prefix is wrong.
[[nodiscard]] constexpr std::uint64_t model_input(std::uint64_t before,
                                                  std::uint32_t token) noexcept {
  return detail::mixed(before + 0x9E3779B97F4A7C15ULL * (token + 1ULL));
}

/// Greedy: the one next token that an output, summed over all ranks, stands for.
[[nodiscard]] constexpr std::uint32_t next_token(std::uint64_t output) noexcept {
  return static_cast<std::uint32_t>(detail::mixed(output) % kVocabulary);
}

}  // namespace kvferry::worker
