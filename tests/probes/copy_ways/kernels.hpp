// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// The kernels of the probe. Launchers take raw pointers and a stream and return the launch's
/// error.
namespace kvferry::probes {

/// A block's place in the arena and on the far side, in blocks.
struct BlockPair {
  std::uint32_t arena;
  std::uint32_t far;
};

/// Blocks that a kernel copies: in the arena a chunk in each region, packed on the far side.
struct KernelBlocks {
  std::byte* arena;
  std::byte* far;
  const BlockPair* pairs;  ///< in device memory
  std::uint32_t count;
  std::uint32_t regions;
  std::uint32_t chunk_bytes;  ///< a multiple of kPieceBytes
  std::uint64_t pitch_bytes;
  bool to_far;
};

/// What a warp copies at a time.
inline constexpr std::uint32_t kPieceBytes = 8192;
inline constexpr unsigned kDecodeThreads = 512;

/// Reads all of [start, start + size_bytes), as a matrix-vector product reads its weights.
cudaError_t launch_stream_weights(const std::byte* start,
                                  std::size_t size_bytes,
                                  unsigned* sink,
                                  unsigned thread_blocks,
                                  cudaStream_t stream);

/// As many thread blocks of launch_stream_weights as leave no place free on any multiprocessor.
cudaError_t count_filling_thread_blocks(unsigned* thread_blocks);

/// Copies by loads and stores, by as many thread blocks of as many warps. Each warp begins a piece
/// every `interval_ns`, or as soon as it can when that is 0.
cudaError_t launch_plain_copy(const KernelBlocks& blocks,
                              unsigned thread_blocks,
                              unsigned warps,
                              unsigned interval_ns,
                              cudaStream_t stream);

/// Copies by bulk copies of the tensor memory accelerator (compute capability 9), by as many thread
/// blocks of one warp, of which one thread issues all. Each begins a piece every `interval_ns`.
cudaError_t launch_bulk_copy(const KernelBlocks& blocks,
                             unsigned thread_blocks,
                             unsigned interval_ns,
                             cudaStream_t stream);

}  // namespace kvferry::probes
