// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

/// 64-bit words of bytes that start and end anywhere.
namespace kvferry::kernels::detail {

inline constexpr std::uint64_t kWordBytes = sizeof(std::uint64_t);

__host__ __device__ inline std::uint64_t words_of(std::uint64_t size_bytes) {
  return (size_bytes + kWordBytes - 1) / kWordBytes;
}

__device__ inline bool is_aligned(const void* at, std::uint64_t alignment) {
  return reinterpret_cast<std::uint64_t>(at) % alignment == 0;
}

/// Word i of [start, start + size_bytes), a last partial one padded with zeros. Odd ones are read
/// byte by byte: the bytes around them may be somebody else's.
__device__ inline std::uint64_t load_word(const unsigned char* start,
                                          std::uint64_t size_bytes,
                                          std::uint64_t i) {
  const unsigned char* at = start + i * kWordBytes;
  const std::uint64_t size = min(kWordBytes, size_bytes - i * kWordBytes);
  if (size == kWordBytes && is_aligned(at, kWordBytes)) {
    return *reinterpret_cast<const std::uint64_t*>(at);
  }
  std::uint64_t word = 0;
  for (std::uint64_t byte = 0; byte < size; ++byte) {
    word |= static_cast<std::uint64_t>(at[byte]) << (8 * byte);
  }
  return word;
}

/// Stores word i of [start, start + size_bytes) and no byte outside: another thread may store the
/// rest of an aligned word at either end.
__device__ inline void store_word(unsigned char* start,
                                  std::uint64_t size_bytes,
                                  std::uint64_t i,
                                  std::uint64_t word) {
  unsigned char* at = start + i * kWordBytes;
  const std::uint64_t size = min(kWordBytes, size_bytes - i * kWordBytes);
  if (size == kWordBytes && is_aligned(at, kWordBytes)) {
    *reinterpret_cast<std::uint64_t*>(at) = word;
    return;
  }
  for (std::uint64_t byte = 0; byte < size; ++byte) {
    at[byte] = static_cast<unsigned char>(word >> (8 * byte));
  }
}

}  // namespace kvferry::kernels::detail
