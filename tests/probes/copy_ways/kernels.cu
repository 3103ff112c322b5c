// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/kernels.hpp"

#include <cuda/ptx>

namespace kvferry::probes {
namespace {

namespace ptx = cuda::ptx;

constexpr unsigned kWarp = 32;
/// Loads of a lane before its first store: enough under way to hide what memory takes to answer.
constexpr unsigned kLoadsAhead = 8;
/// Pieces in shared memory: some are on their way in while one is on its way out.
constexpr unsigned kStages = 4;

__global__ void __launch_bounds__(kDecodeThreads)
    stream_weights_kernel(const uint4* weights, std::size_t count, unsigned* sink) {
  unsigned sum = 0;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const uint4 word = weights[i];
    sum += word.x ^ word.y ^ word.z ^ word.w;
  }
  if (sum == 0x12345) {  // never so, but the compiler must keep the loads
    *sink = sum;
  }
}

struct PieceEnds {
  const std::byte* from;
  std::byte* to;
};

__device__ std::uint64_t pieces_of(const KernelBlocks& blocks) {
  return std::uint64_t{blocks.count} * blocks.regions * (blocks.chunk_bytes / kPieceBytes);
}

__device__ PieceEnds ends_of(const KernelBlocks& blocks, std::uint64_t piece) {
  const std::uint32_t pieces_per_chunk = blocks.chunk_bytes / kPieceBytes;
  const std::uint64_t chunk = piece / pieces_per_chunk;
  const std::uint64_t offset = piece % pieces_per_chunk * kPieceBytes;
  const std::uint64_t region = chunk % blocks.regions;
  const BlockPair pair = blocks.pairs[chunk / blocks.regions];
  std::byte* arena = blocks.arena + region * blocks.pitch_bytes +
                     std::uint64_t{pair.arena} * blocks.chunk_bytes + offset;
  std::byte* far = blocks.far +
                   (std::uint64_t{pair.far} * blocks.regions + region) * blocks.chunk_bytes +
                   offset;
  return blocks.to_far ? PieceEnds{arena, far} : PieceEnds{far, arena};
}

/// Lets its thread begin pieces at a rate.
class Pace {
 public:
  __device__ explicit Pace(unsigned interval_ns)
      : interval_ns_(interval_ns), next_(ptx::get_sreg_globaltimer()) {}

  __device__ void await_turn() {
    if (interval_ns_ == 0) {
      return;
    }
    while (ptx::get_sreg_globaltimer() < next_) {
    }
    next_ += interval_ns_;
  }

 private:
  unsigned interval_ns_;
  std::uint64_t next_;
};

__global__ void plain_copy_kernel(KernelBlocks blocks, unsigned interval_ns) {
  const unsigned warps_per_block = blockDim.x / kWarp;
  const unsigned lane = threadIdx.x % kWarp;
  const std::uint64_t warps = std::uint64_t{gridDim.x} * warps_per_block;
  const std::uint64_t pieces = pieces_of(blocks);
  Pace pace(interval_ns);
  for (std::uint64_t piece = std::uint64_t{blockIdx.x} * warps_per_block + threadIdx.x / kWarp;
       piece < pieces; piece += warps) {
    pace.await_turn();
    const PieceEnds ends = ends_of(blocks, piece);
    const uint4* from = reinterpret_cast<const uint4*>(ends.from);
    uint4* to = reinterpret_cast<uint4*>(ends.to);
    for (unsigned i = lane; i < kPieceBytes / sizeof(uint4); i += kWarp * kLoadsAhead) {
      uint4 words[kLoadsAhead];
#pragma unroll
      for (unsigned j = 0; j < kLoadsAhead; ++j) {
        words[j] = from[i + j * kWarp];
      }
#pragma unroll
      for (unsigned j = 0; j < kLoadsAhead; ++j) {
        to[i + j * kWarp] = words[j];
      }
    }
  }
}

__global__ void bulk_copy_kernel(KernelBlocks blocks, unsigned interval_ns) {
  __shared__ alignas(128) std::byte stages[kStages][kPieceBytes];
  __shared__ std::uint64_t arrived[kStages];
  if (threadIdx.x != 0) {
    return;
  }
  for (std::uint64_t& barrier : arrived) {
    ptx::mbarrier_init(&barrier, 1);
  }
  ptx::fence_proxy_async(ptx::space_shared);  // or the accelerator may see barriers of before

  const std::uint32_t piece_bytes = kPieceBytes;  // instructions take it by reference
  const std::uint64_t pieces = pieces_of(blocks);
  const std::uint64_t mine =
      blockIdx.x < pieces ? (pieces - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  Pace pace(interval_ns);
  std::uint64_t loads = 0;
  const auto load_next = [&] {
    pace.await_turn();
    const PieceEnds ends = ends_of(blocks, blockIdx.x + loads * gridDim.x);
    const unsigned stage = loads % kStages;
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared,
                                   &arrived[stage], piece_bytes);
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, stages[stage], ends.from, piece_bytes,
                       &arrived[stage]);
    ++loads;
  };

  while (loads < kStages - 1 && loads < mine) {
    load_next();
  }
  for (std::uint64_t stored = 0; stored < mine; ++stored) {
    if (loads < mine) {
      // Its stage is that of the store before this one, which must have read it.
      ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
      load_next();
    }
    const unsigned stage = stored % kStages;
    while (!ptx::mbarrier_try_wait_parity(&arrived[stage], stored / kStages % 2)) {
    }
    ptx::cp_async_bulk(ptx::space_global, ptx::space_shared,
                       ends_of(blocks, blockIdx.x + stored * gridDim.x).to, stages[stage],
                       piece_bytes);
    ptx::cp_async_bulk_commit_group();
  }
  ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{});
}

}  // namespace

cudaError_t launch_stream_weights(const std::byte* start,
                                  std::size_t size_bytes,
                                  unsigned* sink,
                                  unsigned thread_blocks,
                                  cudaStream_t stream) {
  stream_weights_kernel<<<thread_blocks, kDecodeThreads, 0, stream>>>(
      reinterpret_cast<const uint4*>(start), size_bytes / sizeof(uint4), sink);
  return cudaGetLastError();
}

cudaError_t count_filling_thread_blocks(unsigned* thread_blocks) {
  int device = 0;
  int multiprocessors = 0;
  int places = 0;
  cudaError_t code = cudaGetDevice(&device);
  if (code == cudaSuccess) {
    code = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (code == cudaSuccess) {
    code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&places, stream_weights_kernel,
                                                         kDecodeThreads, 0);
  }
  *thread_blocks = static_cast<unsigned>(multiprocessors * places);
  return code;
}

cudaError_t launch_plain_copy(const KernelBlocks& blocks,
                              unsigned thread_blocks,
                              unsigned warps,
                              unsigned interval_ns,
                              cudaStream_t stream) {
  plain_copy_kernel<<<thread_blocks, warps * kWarp, 0, stream>>>(blocks, interval_ns);
  return cudaGetLastError();
}

cudaError_t launch_bulk_copy(const KernelBlocks& blocks,
                             unsigned thread_blocks,
                             unsigned interval_ns,
                             cudaStream_t stream) {
  bulk_copy_kernel<<<thread_blocks, kWarp, 0, stream>>>(blocks, interval_ns);
  return cudaGetLastError();
}

}  // namespace kvferry::probes
