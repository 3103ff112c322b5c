// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

/// Marks functions that kernels call, too; nothing where no CUDA compiler reads it.
#if defined(__CUDACC__)
#define KVFERRY_HOST_DEVICE __host__ __device__
#else
#define KVFERRY_HOST_DEVICE
#endif

/// Layout PODs shared by host code and kernels. C++17-clean, no kvferry include, raw pointers.
namespace kvferry::kernels {

/// One strided device range that holds one slice of every block of a group: slice of block b is
/// [base + b * block_stride, + block_bytes).
struct StridedRegion {
  unsigned char* base = nullptr;    ///< Device address of block 0's slice; any alignment.
  std::uint64_t block_stride = 0;   ///< Bytes between neighbouring blocks, >= block_bytes.
  std::uint64_t block_bytes = 0;    ///< Bytes of one slice; any size > 0.
  std::uint64_t packed_offset = 0;  ///< Where the slice lies inside the packed block.
  std::uint64_t salt = 0;           ///< Distinguishes this region's fill pattern from others'.
};

/// Gather and scatter between strided regions and packed blocks: packed block i of the call is
/// [packed + i * packed_stride, ...). Regions are device-readable for the launch's whole run.
struct PackedBlocks {
  const StridedRegion* regions = nullptr;
  std::uint32_t region_count = 0;
  unsigned char* packed = nullptr;
  std::uint64_t packed_stride = 0;
};

/// Block ids travel by value as a kernel parameter: nothing to upload, nothing to keep alive.
inline constexpr std::uint32_t kMaxBlocksPerLaunch = 256;

struct BlockIds {
  std::uint32_t count = 0;
  // NOLINTNEXTLINE(modernize-avoid-c-arrays): indexed by device code
  std::uint32_t ids[kMaxBlocksPerLaunch] = {};
};

/// A block id with the seed of the contents that it should hold.
struct SeededBlock {
  std::uint64_t seed = 0;
  std::uint32_t id = 0;
  std::uint32_t reserved = 0;
};

inline constexpr std::uint32_t kMaxSeededPerLaunch = 192;

struct SeededBlocks {
  std::uint32_t count = 0;
  // NOLINTNEXTLINE(modernize-avoid-c-arrays): indexed by device code
  SeededBlock blocks[kMaxSeededPerLaunch] = {};
};

static_assert(std::is_trivially_copyable<StridedRegion>::value, "crosses to the device by value");
static_assert(std::is_trivially_copyable<BlockIds>::value && sizeof(BlockIds) < 4000,
              "must fit the 4 KiB kernel parameter space");
static_assert(std::is_trivially_copyable<SeededBlocks>::value && sizeof(SeededBlocks) < 4000,
              "must fit the 4 KiB kernel parameter space");

/// The 64-bit word that the fill pattern puts at byte offset 8 * word_index of a slice
/// (little-endian; a last partial word is cut off). Same function on host and device.
KVFERRY_HOST_DEVICE inline std::uint64_t pattern_word(std::uint64_t seed,
                                                      std::uint64_t salt,
                                                      std::uint64_t word_index) {
  std::uint64_t x = seed ^ (salt * 0x9E3779B97F4A7C15ULL);
  x += word_index * 0xD1B54A32D192ED03ULL;
  x ^= x >> 32;
  x *= 0xBF58476D1CE4E5B9ULL;
  x ^= x >> 29;
  return x;
}

/// What 64-bit word word_index of a slice (a last partial word is padded with zeros) adds to its
/// block's checksum, modulo 2^64. region_index is the region's place in the call. The terms can be
/// added in any order, while moving a word changes the sum. Same function on host and device.
#if defined(__CUDACC__)
__host__ __device__
#endif
    inline std::uint64_t
    checksum_term(std::uint64_t word, std::uint32_t region_index, std::uint64_t word_index) {
  std::uint64_t x = word + (region_index + 1ULL) * 0x9E3779B97F4A7C15ULL;
  x += word_index * 0xD1B54A32D192ED03ULL;
  x ^= x >> 32;
  x *= 0x94D049BB133111EBULL;
  return x ^ (x >> 29);
}

}  // namespace kvferry::kernels
