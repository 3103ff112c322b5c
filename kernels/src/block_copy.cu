// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/kernels/block_copy.hpp"
#include "region_batch.hpp"

namespace kvferry::kernels {
namespace {

constexpr std::uint32_t kThreads = 512;
constexpr std::uint32_t kWarpsPerCta = kThreads / 32;
// One warp's share at a time: long enough to keep many loads in flight, short enough that a few
// large slices still spread over all warps.
constexpr std::uint64_t kPieceBytes = 8192;

// Copies size bytes with the widest access that both addresses and the size allow.
template <typename Word>
__device__ void copy_words(unsigned char* to,
                           const unsigned char* from,
                           std::uint64_t size_bytes,
                           std::uint32_t lane) {
  constexpr int kUnroll = 8;
  auto* target = reinterpret_cast<Word*>(to);
  const auto* source = reinterpret_cast<const Word*>(from);
  const std::uint64_t words = size_bytes / sizeof(Word);
  std::uint64_t i = lane;
  for (; i + (kUnroll - 1) * 32 < words; i += kUnroll * 32) {
    Word loaded[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) loaded[k] = source[i + k * 32];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) target[i + k * 32] = loaded[k];
  }
  for (; i < words; i += 32) target[i] = source[i];
}

__device__ void copy_piece(unsigned char* to,
                           const unsigned char* from,
                           std::uint64_t size_bytes,
                           std::uint32_t lane) {
  const std::uint64_t bits =
      reinterpret_cast<std::uint64_t>(to) | reinterpret_cast<std::uint64_t>(from) | size_bytes;
  if (bits % sizeof(uint4) == 0) {
    copy_words<uint4>(to, from, size_bytes, lane);
  } else if (bits % sizeof(std::uint64_t) == 0) {
    copy_words<std::uint64_t>(to, from, size_bytes, lane);
  } else if (bits % sizeof(std::uint32_t) == 0) {
    copy_words<std::uint32_t>(to, from, size_bytes, lane);
  } else {
    copy_words<unsigned char>(to, from, size_bytes, lane);
  }
}

template <bool kGather>
__global__ void __launch_bounds__(kThreads)
    block_copy_kernel(const __grid_constant__ detail::RegionBatch batch,
                      const __grid_constant__ BlockIds ids,
                      unsigned char* packed,
                      std::uint64_t packed_stride,
                      std::uint64_t pieces_per_slice) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint64_t warp = std::uint64_t{blockIdx.x} * kWarpsPerCta + threadIdx.x / 32;
  const std::uint64_t warps = std::uint64_t{gridDim.x} * kWarpsPerCta;
  const std::uint64_t pieces = std::uint64_t{ids.count} * batch.count * pieces_per_slice;
  for (std::uint64_t piece = warp; piece < pieces; piece += warps) {
    const std::uint64_t offset = piece % pieces_per_slice * kPieceBytes;
    const std::uint64_t slice = piece / pieces_per_slice;
    const StridedRegion& region = batch.regions[slice % batch.count];
    if (offset >= region.block_bytes) continue;
    const auto block = static_cast<std::uint32_t>(slice / batch.count);
    const std::uint64_t size = min(kPieceBytes, region.block_bytes - offset);
    unsigned char* strided =
        region.base + std::uint64_t{ids.ids[block]} * region.block_stride + offset;
    unsigned char* dense = packed + block * packed_stride + region.packed_offset + offset;
    copy_piece(kGather ? dense : strided, kGather ? strided : dense, size, lane);
  }
}

template <bool kGather>
cudaError_t launch(const PackedBlocks& layout,
                   const BlockIds& ids,
                   std::uint32_t max_ctas,
                   cudaStream_t stream) {
  if (ids.count == 0) return cudaSuccess;
  return detail::for_each_batch(
      layout.regions, layout.region_count, [&](const detail::RegionBatch& batch) {
        const std::uint64_t per_slice = (batch.max_slice_bytes + kPieceBytes - 1) / kPieceBytes;
        const std::uint64_t pieces = std::uint64_t{ids.count} * batch.count * per_slice;
        const std::uint64_t ctas = std::min<std::uint64_t>(
            std::max(max_ctas, 1U), (pieces + kWarpsPerCta - 1) / kWarpsPerCta);
        block_copy_kernel<kGather><<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(
            batch, ids, layout.packed, layout.packed_stride, per_slice);
        return cudaGetLastError();
      });
}

}  // namespace

cudaError_t launch_gather(const PackedBlocks& layout,
                          const BlockIds& ids,
                          std::uint32_t max_ctas,
                          cudaStream_t stream) {
  return launch<true>(layout, ids, max_ctas, stream);
}

cudaError_t launch_scatter(const PackedBlocks& layout,
                           const BlockIds& ids,
                           std::uint32_t max_ctas,
                           cudaStream_t stream) {
  return launch<false>(layout, ids, max_ctas, stream);
}

cudaError_t load_block_copy() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaSuccess;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, block_copy_kernel<true>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, block_copy_kernel<false>);
  return error;
}

}  // namespace kvferry::kernels
