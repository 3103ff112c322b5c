// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/kernels/block_layout.hpp"

#include <cstdint>
#include <type_traits>

/// The reference model: whole numbers in place of a transformer. What it writes into the KV cache
/// depends on its weights and its input, what it answers on its weights and on every word of the KV
/// cache that it reads, and host and device agree to the bit. C++17-clean PODs and formulas.
namespace kvferry::kernels {

/// A model's weights are packed into two tables of so many 64-bit words.
inline constexpr std::uint32_t kModelWords = 1024;

/// Tokens that a block can hold at most.
inline constexpr std::uint32_t kMaxTokensPerBlock = 65'536;

/// Writes the KV of tokens [first_token, first_token + tokens) of a block in every region. A token
/// that two writes of one pass name gets bytes of either.
struct TokenWrite {
  std::uint64_t input = 0;  ///< What the model is fed with: all that tells two writes apart.
  std::uint32_t block = 0;
  std::uint32_t first_token = 0;
  std::uint32_t tokens = 0;
  std::uint32_t reserved = 0;
};

/// Reads the KV of tokens [first_token, first_token + tokens) of a block for one sequence.
struct TokenRead {
  std::uint32_t sequence = 0;  ///< Whose output it adds to; beyond the outputs: not read at all.
  std::uint32_t block = 0;
  std::uint32_t position = 0;  ///< Where in its sequence the block lies.
  std::uint32_t first_token = 0;
  std::uint32_t tokens = 0;
  std::uint32_t reserved = 0;
};

/// One step of the model: all writes, then all reads, which see them. Everything is found at
/// addresses of the device, so that the same launch serves whatever lies there by then. Blocks and
/// tokens are trusted: the caller has checked them against the layout.
struct DecodePass {
  /// [0]: writes, [1]: reads. More than there is room for is taken as all the room there is.
  const std::uint32_t* counts = nullptr;
  const TokenWrite* writes = nullptr;
  const TokenRead* reads = nullptr;
  /// 2 * kModelWords: what is written depends on the first table, and what is read is mixed with
  /// the second.
  const std::uint64_t* model = nullptr;
  std::uint64_t* outputs = nullptr;  ///< A word per sequence, added to modulo 2^64.
  std::uint32_t max_writes = 0;
  std::uint32_t max_reads = 0;
  std::uint32_t max_sequences = 0;
  std::uint32_t tokens_per_block = 0;  ///< 1 to kMaxTokensPerBlock.
};

static_assert(sizeof(TokenWrite) == 24 && std::is_trivially_copyable<TokenWrite>::value,
              "lies in device memory as host code wrote it");
static_assert(sizeof(TokenRead) == 24 && std::is_trivially_copyable<TokenRead>::value,
              "lies in device memory as host code wrote it");
static_assert(sizeof(DecodePass) == 56 && std::is_trivially_copyable<DecodePass>::value,
              "crosses to the device by value");

/// Where the bytes of some tokens lie within one region.
struct TokenBytes {
  unsigned char* at = nullptr;
  std::uint64_t size_bytes = 0;
};

/// Token t of a slice of B bytes with T tokens starts at byte t * B / T, which need not be aligned:
/// neighbouring tokens may share a 64-bit word, never a byte.
KVFERRY_HOST_DEVICE inline TokenBytes token_bytes(const StridedRegion& region,
                                                  std::uint32_t block,
                                                  std::uint32_t first_token,
                                                  std::uint32_t tokens,
                                                  std::uint32_t tokens_per_block) {
  const std::uint64_t last = std::uint64_t{first_token} + tokens;
  const std::uint64_t begin = first_token * region.block_bytes / tokens_per_block;
  const std::uint64_t end = last * region.block_bytes / tokens_per_block;
  return {region.base + block * region.block_stride + begin, end - begin};
}

/// 64-bit word i, counted from the start of the tokens, of what a write with this input puts into a
/// region (little-endian; a last partial word is cut off). model: the first table.
KVFERRY_HOST_DEVICE inline std::uint64_t kv_word(std::uint64_t input,
                                                 const std::uint64_t* model,
                                                 std::uint64_t salt,
                                                 std::uint64_t i) {
  return pattern_word(input ^ model[(i + salt) % kModelWords], salt, i);
}

/// What word i, counted from the start of the tokens, of a read (a last partial word is padded with
/// zeros) adds to the output of its sequence. weight: word (i + salt) % kModelWords of the second
/// table. Different for every other value of any one argument; the sum of terms has no order.
KVFERRY_HOST_DEVICE inline std::uint64_t attend_term(std::uint64_t word,
                                                     std::uint64_t weight,
                                                     std::uint32_t position,
                                                     std::uint64_t salt,
                                                     std::uint64_t i) {
  std::uint64_t x = word + (position + 1ULL) * 0x9E3779B97F4A7C15ULL;
  x += salt * 0xC2B2AE3D27D4EB4FULL + i * 0xD1B54A32D192ED03ULL;
  x ^= x >> 32;
  x *= 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 29)) + weight;
  x *= 0x94D049BB133111EBULL;
  return x ^ (x >> 32);
}

/// What word i of some bytes (a last partial word is padded with zeros) adds to sum
/// i % kModelWords. Different for every other value of any one argument.
KVFERRY_HOST_DEVICE inline std::uint64_t fold_term(std::uint64_t word,
                                                   std::uint64_t i,
                                                   std::uint64_t seed) {
  std::uint64_t x = word + i * 0x9E3779B97F4A7C15ULL;
  x ^= x >> 32;
  x *= 0x94D049BB133111EBULL;
  x = (x ^ (x >> 29)) + seed;
  x *= 0xBF58476D1CE4E5B9ULL;
  return x ^ (x >> 32);
}

/// Word j of what is made of n source words, of which this is word j % n.
KVFERRY_HOST_DEVICE inline std::uint64_t expand_word(std::uint64_t word, std::uint64_t j) {
  std::uint64_t x = word + (j + 1) * 0xD1B54A32D192ED03ULL;
  x ^= x >> 32;
  x *= 0xBF58476D1CE4E5B9ULL;
  return x ^ (x >> 29);
}

}  // namespace kvferry::kernels
