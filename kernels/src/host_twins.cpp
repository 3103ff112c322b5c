// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/kernels/host_twins.hpp"

#include <cstring>

namespace kvferry::kernels::host {
namespace {

constexpr std::uint64_t kWordBytes = sizeof(std::uint64_t);

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "the pattern is defined over little-endian words");

unsigned char* slice_of(const StridedRegion& region, std::uint32_t block) {
  return region.base + std::uint64_t{block} * region.block_stride;
}

// Slices start anywhere; a memcpy of constant size is one unaligned load or store.
std::uint64_t load_word(const unsigned char* at) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, kWordBytes);
  return word;
}

std::uint64_t load_tail(const unsigned char* at, std::uint64_t size_bytes) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, size_bytes);
  return word;
}

void fill_slice(unsigned char* slice,
                std::uint64_t size_bytes,
                std::uint64_t seed,
                std::uint64_t salt) {
  const std::uint64_t words = size_bytes / kWordBytes;
  for (std::uint64_t i = 0; i < words; ++i) {
    const std::uint64_t word = pattern_word(seed, salt, i);
    std::memcpy(slice + i * kWordBytes, &word, kWordBytes);
  }
  const std::uint64_t tail = pattern_word(seed, salt, words);
  std::memcpy(slice + words * kWordBytes, &tail, size_bytes % kWordBytes);
}

std::uint64_t count_mismatches(const unsigned char* slice,
                               std::uint64_t size_bytes,
                               std::uint64_t seed,
                               std::uint64_t salt) {
  const std::uint64_t words = size_bytes / kWordBytes;
  std::uint64_t mismatches = 0;
  for (std::uint64_t i = 0; i < words; ++i) {
    mismatches += load_word(slice + i * kWordBytes) != pattern_word(seed, salt, i) ? 1U : 0U;
  }
  const std::uint64_t tail = pattern_word(seed, salt, words);
  if (std::memcmp(slice + words * kWordBytes, &tail, size_bytes % kWordBytes) != 0) ++mismatches;
  return mismatches;
}

std::uint64_t checksum_slice(const unsigned char* slice,
                             std::uint64_t size_bytes,
                             std::uint32_t region_index) {
  const std::uint64_t words = size_bytes / kWordBytes;
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < words; ++i) {
    sum += checksum_term(load_word(slice + i * kWordBytes), region_index, i);
  }
  if (size_bytes % kWordBytes != 0) {
    const std::uint64_t word = load_tail(slice + words * kWordBytes, size_bytes % kWordBytes);
    sum += checksum_term(word, region_index, words);
  }
  return sum;
}

}  // namespace

void gather(const PackedBlocks& layout, const BlockIds& ids) {
  for (std::uint32_t i = 0; i < ids.count; ++i) {
    unsigned char* const packed = layout.packed + i * layout.packed_stride;
    for (std::uint32_t r = 0; r < layout.region_count; ++r) {
      const StridedRegion& region = layout.regions[r];
      std::memcpy(packed + region.packed_offset, slice_of(region, ids.ids[i]), region.block_bytes);
    }
  }
}

void scatter(const PackedBlocks& layout, const BlockIds& ids) {
  for (std::uint32_t i = 0; i < ids.count; ++i) {
    const unsigned char* const packed = layout.packed + i * layout.packed_stride;
    for (std::uint32_t r = 0; r < layout.region_count; ++r) {
      const StridedRegion& region = layout.regions[r];
      std::memcpy(slice_of(region, ids.ids[i]), packed + region.packed_offset, region.block_bytes);
    }
  }
}

void fill_pattern(const StridedRegion* regions,
                  std::uint32_t region_count,
                  const SeededBlocks& blocks) {
  for (std::uint32_t i = 0; i < blocks.count; ++i) {
    const SeededBlock& block = blocks.blocks[i];
    for (std::uint32_t r = 0; r < region_count; ++r) {
      fill_slice(slice_of(regions[r], block.id), regions[r].block_bytes, block.seed,
                 regions[r].salt);
    }
  }
}

void verify_pattern(const StridedRegion* regions,
                    std::uint32_t region_count,
                    const SeededBlocks& blocks,
                    std::uint64_t* mismatches) {
  for (std::uint32_t i = 0; i < blocks.count; ++i) {
    const SeededBlock& block = blocks.blocks[i];
    for (std::uint32_t r = 0; r < region_count; ++r) {
      mismatches[i] += count_mismatches(slice_of(regions[r], block.id), regions[r].block_bytes,
                                        block.seed, regions[r].salt);
    }
  }
}

void checksum(const StridedRegion* regions,
              std::uint32_t region_count,
              const BlockIds& ids,
              std::uint64_t* checksums) {
  for (std::uint32_t i = 0; i < ids.count; ++i) {
    std::uint64_t sum = 0;
    for (std::uint32_t r = 0; r < region_count; ++r) {
      sum += checksum_slice(slice_of(regions[r], ids.ids[i]), regions[r].block_bytes, r);
    }
    checksums[i] = sum;
  }
}

}  // namespace kvferry::kernels::host
