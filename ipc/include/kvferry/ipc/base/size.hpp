// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cstdint>
#include <string>
#include <string_view>

namespace kvferry::ipc {

/// Parses "512", "64KiB", "1.5 GiB", "2GB", "8G": binary for KiB/K, MiB/M, GiB/G, TiB/T, decimal
/// for KB, MB, GB, TB. Zero, negative, overflowing and trailing text are kInvalidArgument.
[[nodiscard]] Result<std::uint64_t> parse_size(std::string_view text);

/// "1.50 GiB", "12.0 MiB", "512 B".
[[nodiscard]] std::string format_size(std::uint64_t size_bytes);

/// a * b and a + b, or nothing when 64 bits do not hold it.
[[nodiscard]] constexpr bool checked_mul(std::uint64_t a, std::uint64_t b, std::uint64_t& out) {
  return !__builtin_mul_overflow(a, b, &out);
}
[[nodiscard]] constexpr bool checked_add(std::uint64_t a, std::uint64_t b, std::uint64_t& out) {
  return !__builtin_add_overflow(a, b, &out);
}

/// Rounds up to a multiple of alignment (a power of two). @pre no overflow.
[[nodiscard]] constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

}  // namespace kvferry::ipc
