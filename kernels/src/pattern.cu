// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/kernels/block_copy.hpp"
#include "region_batch.hpp"
#include "word_io.cuh"

namespace kvferry::kernels {
namespace {

constexpr std::uint32_t kThreads = 256;

using detail::kWordBytes;
using detail::load_word;
using detail::store_word;

__device__ std::uint64_t word_count(const StridedRegion& region) {
  return detail::words_of(region.block_bytes);
}

__device__ std::uint64_t cut_word(const StridedRegion& region,
                                  std::uint64_t i,
                                  std::uint64_t word) {
  const std::uint64_t size = min(kWordBytes, region.block_bytes - i * kWordBytes);
  return size == kWordBytes ? word : word & ((1ULL << (8 * size)) - 1);
}

// Sum over the thread block; the result is valid in thread 0.
__device__ std::uint64_t cta_sum(std::uint64_t value) {
  __shared__ std::uint64_t warps[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xFFFFFFFFU, value, offset);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  std::uint64_t sum = 0;
  if (threadIdx.x == 0) {
    for (std::uint64_t part : warps) sum += part;
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    fill_kernel(const __grid_constant__ detail::RegionBatch batch,
                const __grid_constant__ SeededBlocks blocks) {
  const SeededBlock& block = blocks.blocks[blockIdx.x];
  for (std::uint32_t r = blockIdx.y; r < batch.count; r += gridDim.y) {
    const StridedRegion& region = batch.regions[r];
    unsigned char* slice = region.base + std::uint64_t{block.id} * region.block_stride;
    for (std::uint64_t i = threadIdx.x; i < word_count(region); i += kThreads) {
      store_word(slice, region.block_bytes, i, pattern_word(block.seed, region.salt, i));
    }
  }
}

// One thread block per KV block, so that its count has one writer and needs no atomics: results
// lie in host memory.
__global__ void __launch_bounds__(kThreads)
    verify_kernel(const __grid_constant__ detail::RegionBatch batch,
                  const __grid_constant__ SeededBlocks blocks,
                  std::uint64_t* mismatches) {
  const SeededBlock& block = blocks.blocks[blockIdx.x];
  std::uint64_t count = 0;
  for (std::uint32_t r = 0; r < batch.count; ++r) {
    const StridedRegion& region = batch.regions[r];
    const unsigned char* slice = region.base + std::uint64_t{block.id} * region.block_stride;
    for (std::uint64_t i = threadIdx.x; i < word_count(region); i += kThreads) {
      const std::uint64_t expected = cut_word(region, i, pattern_word(block.seed, region.salt, i));
      if (load_word(slice, region.block_bytes, i) != expected) ++count;
    }
  }
  count = cta_sum(count);
  if (threadIdx.x == 0 && count != 0) mismatches[blockIdx.x] += count;
}

__global__ void __launch_bounds__(kThreads)
    checksum_kernel(const __grid_constant__ detail::RegionBatch batch,
                    const __grid_constant__ BlockIds ids,
                    std::uint64_t* checksums) {
  std::uint64_t sum = 0;
  for (std::uint32_t r = 0; r < batch.count; ++r) {
    const StridedRegion& region = batch.regions[r];
    const unsigned char* slice =
        region.base + std::uint64_t{ids.ids[blockIdx.x]} * region.block_stride;
    for (std::uint64_t i = threadIdx.x; i < word_count(region); i += kThreads) {
      sum += checksum_term(load_word(slice, region.block_bytes, i), batch.first + r, i);
    }
  }
  sum = cta_sum(sum);
  if (threadIdx.x != 0) return;
  checksums[blockIdx.x] = batch.first == 0 ? sum : checksums[blockIdx.x] + sum;
}

}  // namespace

cudaError_t launch_fill_pattern(const StridedRegion* regions,
                                std::uint32_t region_count,
                                const SeededBlocks& blocks,
                                cudaStream_t stream) {
  if (blocks.count == 0) return cudaSuccess;
  return detail::for_each_batch(regions, region_count, [&](const detail::RegionBatch& batch) {
    const dim3 grid(blocks.count, std::min(batch.count, 64U));
    fill_kernel<<<grid, kThreads, 0, stream>>>(batch, blocks);
    return cudaGetLastError();
  });
}

cudaError_t launch_verify_pattern(const StridedRegion* regions,
                                  std::uint32_t region_count,
                                  const SeededBlocks& blocks,
                                  std::uint64_t* mismatches,
                                  cudaStream_t stream) {
  if (blocks.count == 0) return cudaSuccess;
  return detail::for_each_batch(regions, region_count, [&](const detail::RegionBatch& batch) {
    verify_kernel<<<blocks.count, kThreads, 0, stream>>>(batch, blocks, mismatches);
    return cudaGetLastError();
  });
}

cudaError_t launch_checksum(const StridedRegion* regions,
                            std::uint32_t region_count,
                            const BlockIds& ids,
                            std::uint64_t* checksums,
                            cudaStream_t stream) {
  if (ids.count == 0) return cudaSuccess;
  return detail::for_each_batch(regions, region_count, [&](const detail::RegionBatch& batch) {
    checksum_kernel<<<ids.count, kThreads, 0, stream>>>(batch, ids, checksums);
    return cudaGetLastError();
  });
}

cudaError_t load_pattern() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaSuccess;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, fill_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, verify_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, checksum_kernel);
  return error;
}

}  // namespace kvferry::kernels
