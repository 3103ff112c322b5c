// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/kernels/block_layout.hpp"
#include "kvferry/kernels/reference_model.hpp"

#include <cstdint>

/// CPU twins of the kernels: the host backend runs them on its streams, tests use them as the
/// reference for the CUDA kernels. @threading any; the caller orders access to the memory.
namespace kvferry::kernels::host {

/// packed block i <- slices of block ids.ids[i].
void gather(const PackedBlocks& layout, const BlockIds& ids);

/// slices of block ids.ids[i] <- packed block i.
void scatter(const PackedBlocks& layout, const BlockIds& ids);

/// Fills every slice of every block with pattern_word(seed, region.salt, word).
void fill_pattern(const StridedRegion* regions,
                  std::uint32_t region_count,
                  const SeededBlocks& blocks);

/// Adds to mismatches[i] the number of words of block i that differ from the pattern.
void verify_pattern(const StridedRegion* regions,
                    std::uint32_t region_count,
                    const SeededBlocks& blocks,
                    std::uint64_t* mismatches);

/// checksums[i] <- sum of checksum_term over all words of block i (read-only pass: what a
/// decode step's attention reads).
void checksum(const StridedRegion* regions,
              std::uint32_t region_count,
              const BlockIds& ids,
              std::uint64_t* checksums);

/// Writes and then reads what the pass says; see DecodePass.
void decode(const StridedRegion* regions, std::uint32_t region_count, const DecodePass& pass);

/// sums[i % kModelWords] += fold_term(word i, i, seed) over all words of the source.
void fold(const unsigned char* source,
          std::uint64_t size_bytes,
          std::uint64_t seed,
          std::uint64_t* sums);

/// Word j of the target <- expand_word(word j % n of the source, j), n the source's words, n > 0.
void expand(const unsigned char* source,
            std::uint64_t source_bytes,
            unsigned char* target,
            std::uint64_t target_bytes);

}  // namespace kvferry::kernels::host
