// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/kernels/block_layout.hpp"

#include <cuda_runtime_api.h>

#include <cstdint>

/// Launchers of the CUDA kernels. Regions are read from host memory during the call and travel as a
/// kernel parameter, so nothing is uploaded and nothing must be kept alive; block ids likewise.
/// Addresses inside them are device addresses. Launchers never allocate, synchronise or throw.
/// @threading any, one at a time per stream. @stream ordered in the given stream; nothing has
/// happened yet on return.
namespace kvferry::kernels {

/// Loads the kernels of this header into the current context. Else each is loaded at its first
/// launch, which may wait for the device to be idle: for ever, where a stream of it waits for that
/// launch.
cudaError_t load_block_copy();
cudaError_t load_pattern();

/// packed block i <- slices of block ids.ids[i], with at most max_ctas thread blocks.
cudaError_t launch_gather(const PackedBlocks& layout,
                          const BlockIds& ids,
                          std::uint32_t max_ctas,
                          cudaStream_t stream);

/// slices of block ids.ids[i] <- packed block i.
cudaError_t launch_scatter(const PackedBlocks& layout,
                           const BlockIds& ids,
                           std::uint32_t max_ctas,
                           cudaStream_t stream);

/// Fills every slice of every block with pattern_word(seed, region.salt, word).
cudaError_t launch_fill_pattern(const StridedRegion* regions,
                                std::uint32_t region_count,
                                const SeededBlocks& blocks,
                                cudaStream_t stream);

/// Adds to mismatches[i] (device-writable) the number of words of block i that differ.
cudaError_t launch_verify_pattern(const StridedRegion* regions,
                                  std::uint32_t region_count,
                                  const SeededBlocks& blocks,
                                  std::uint64_t* mismatches,
                                  cudaStream_t stream);

/// checksums[i] (device-writable) <- sum of checksum_term over all words of block i.
cudaError_t launch_checksum(const StridedRegion* regions,
                            std::uint32_t region_count,
                            const BlockIds& ids,
                            std::uint64_t* checksums,
                            cudaStream_t stream);

}  // namespace kvferry::kernels
