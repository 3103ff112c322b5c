// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>

/// 64-bit words of bytes that start and end anywhere.
namespace kvferry::kernels::host::detail {

inline constexpr std::uint64_t kWordBytes = sizeof(std::uint64_t);

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "words of KV are defined as little-endian ones");

inline std::uint64_t words_of(std::uint64_t size_bytes) {
  return (size_bytes + kWordBytes - 1) / kWordBytes;
}

/// A memcpy of constant size is one unaligned load or store.
inline std::uint64_t load_word(const unsigned char* at) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, kWordBytes);
  return word;
}

inline std::uint64_t load_tail(const unsigned char* at, std::uint64_t size_bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, size_bytes);
  return word;
}

/// Calls use(i, word) for all words of the bytes; a last partial one is padded with zeros.
template <typename Use>
void for_each_word(const unsigned char* bytes, std::uint64_t size_bytes, Use use) {
  const std::uint64_t full = size_bytes / kWordBytes;
  for (std::uint64_t i = 0; i < full; ++i) use(i, load_word(bytes + i * kWordBytes));
  const std::uint64_t rest = size_bytes % kWordBytes;
  if (rest != 0) use(full, load_tail(bytes + full * kWordBytes, rest));
}

/// Stores make(i) as word i of the bytes; of a last partial one only what lies within.
template <typename Make>
void store_words(unsigned char* bytes, std::uint64_t size_bytes, Make make) {
  const std::uint64_t full = size_bytes / kWordBytes;
  for (std::uint64_t i = 0; i < full; ++i) {
    const std::uint64_t word = make(i);
    std::memcpy(bytes + i * kWordBytes, &word, kWordBytes);
  }
  const std::uint64_t rest = size_bytes % kWordBytes;
  if (rest == 0) return;
  const std::uint64_t word = make(full);
  std::memcpy(bytes + full * kWordBytes, &word, rest);
}

}  // namespace kvferry::kernels::host::detail
