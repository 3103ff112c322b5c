// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/kernels/host_twins.hpp"

#include "host_words.hpp"

#include <cstring>

namespace kvferry::kernels::host {
namespace {

using detail::kWordBytes;
using detail::load_word;

unsigned char* slice_of(const StridedRegion& region, std::uint32_t block) {
  return region.base + std::uint64_t{block} * region.block_stride;
}

void fill_slice(unsigned char* slice,
                std::uint64_t size_bytes,
                std::uint64_t seed,
                std::uint64_t salt) {
  detail::store_words(slice, size_bytes,
                      [&](std::uint64_t i) { return pattern_word(seed, salt, i); });
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
  std::uint64_t sum = 0;
  detail::for_each_word(slice, size_bytes, [&](std::uint64_t i, std::uint64_t word) {
    sum += checksum_term(word, region_index, i);
  });
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
