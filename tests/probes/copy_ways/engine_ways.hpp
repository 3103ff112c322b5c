// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/way.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>

/// Ways that copy engines copy by.
namespace kvferry::probes {

/// Copies of so much that lies together, wherever blocks lie: what the link gives, when it is
/// large.
std::unique_ptr<Way> plain_copy(const BlockSequence& blocks,
                                Direction direction,
                                std::size_t size_bytes);

/// 2D copies of so many rows, a chunk each; `rows` divides kRegions.
std::unique_ptr<Way> rows(const BlockSequence& blocks,
                          Direction direction,
                          std::uint32_t rows,
                          std::uint64_t first_block = 0);

/// cudaMemcpyBatchAsync of chunks, with flags of cudaMemcpyFlags.
std::unique_ptr<Way> batch(const BlockSequence& blocks,
                           Direction direction,
                           unsigned flags,
                           std::uint64_t first_block = 0);

/// cudaMemcpy3DBatchAsync of blocks.
std::unique_ptr<Way> batch_3d(const BlockSequence& blocks, Direction direction);

/// A cudaMemcpyAsync for each chunk.
std::unique_ptr<Way> single_chunks(const BlockSequence& blocks, Direction direction);

/// A graph of one copy node for each chunk, in so many branches of nodes after one another.
std::unique_ptr<Way> graph(const BlockSequence& blocks,
                           Direction direction,
                           std::uint32_t branches);

/// A gather through the ring: `ring_way` between the arena and a slot of the ring on a stream of
/// its own, and one large copy between that slot and host memory.
std::unique_ptr<Way> staged(std::unique_ptr<Way> ring_way,
                            const BlockSequence& host_blocks,
                            Direction direction);

}  // namespace kvferry::probes
