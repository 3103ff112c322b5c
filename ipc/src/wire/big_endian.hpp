// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

namespace kvferry::ipc {

/// As sequence numbers of KV events are sent.
inline std::array<std::uint8_t, 8> to_big_endian(std::uint64_t value) noexcept {
  std::array<std::uint8_t, 8> bytes{};
  for (auto at = bytes.rbegin(); at != bytes.rend(); ++at, value >>= 8U) {
    *at = static_cast<std::uint8_t>(value);
  }
  return bytes;
}

/// Nothing for another size.
inline std::optional<std::uint64_t> read_big_endian(std::span<const std::uint8_t> bytes) noexcept {
  if (bytes.size() != sizeof(std::uint64_t)) return std::nullopt;
  std::uint64_t value = 0;
  for (const std::uint8_t byte : bytes) value = value << 8U | byte;
  return value;
}

}  // namespace kvferry::ipc
