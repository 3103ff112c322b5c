// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/kernels/reference_model_launch.hpp"
#include "region_batch.hpp"
#include "word_io.cuh"

namespace kvferry::kernels {
namespace {

using detail::load_word;
using detail::store_word;
using detail::words_of;

constexpr std::uint32_t kThreads = 512;
constexpr std::uint32_t kWarpsPerCta = kThreads / 32;
// Two for each multiprocessor of the GPUs that serve models: what is launched is bounded, and the
// same on all of them.
constexpr std::uint32_t kMaxCtas = 264;
// One warp's share at a time: long enough to keep many loads in flight, short enough that a few
// large slices still spread over all warps.
constexpr std::uint32_t kPieceWords = 1024;
constexpr std::uint64_t kPieceBytes = kPieceWords * detail::kWordBytes;

__device__ void add_to(std::uint64_t& target, std::uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(&target), value);
}

/// The pieces of all regions of all items of a pass, as a warp walks over its part of them.
/// Neighbours stay together, so that a warp adds to the output of a sequence once and not for each
/// piece.
class PieceWalk {
 public:
  __device__ PieceWalk(std::uint32_t items, std::uint32_t regions, std::uint64_t pieces_per_slice)
      : regions_(regions), pieces_per_slice_(pieces_per_slice) {
    const std::uint64_t total = items * pieces_per_slice * regions;
    const std::uint64_t warps = std::uint64_t{gridDim.x} * kWarpsPerCta;
    // Counted over the thread blocks first: a few pieces occupy all multiprocessors.
    const std::uint64_t warp = std::uint64_t{threadIdx.x / 32} * gridDim.x + blockIdx.x;
    left_ = total / warps + (warp < total % warps ? 1 : 0);
    const std::uint64_t first = warp * (total / warps) + min(warp, total % warps);
    piece_ = first % pieces_per_slice;
    region_ = static_cast<std::uint32_t>(first / pieces_per_slice % regions);
    item_ = static_cast<std::uint32_t>(first / pieces_per_slice / regions);
  }

  /// Whether no warp of this thread block has work: its first one has as much as any.
  static __device__ bool is_idle(std::uint32_t items,
                                 std::uint32_t regions,
                                 std::uint64_t pieces_per_slice) {
    return blockIdx.x >= items * pieces_per_slice * regions;
  }

  __device__ bool has_more() const { return left_ > 0; }

  __device__ void next() {
    --left_;
    if (++piece_ < pieces_per_slice_) return;
    piece_ = 0;
    if (++region_ < regions_) return;
    region_ = 0;
    ++item_;
  }

  __device__ std::uint32_t item() const { return item_; }
  __device__ std::uint32_t region() const { return region_; }
  __device__ std::uint64_t first_word() const { return piece_ * kPieceWords; }

 private:
  std::uint32_t regions_;
  std::uint32_t region_;
  std::uint32_t item_;
  std::uint64_t pieces_per_slice_;
  std::uint64_t piece_;
  std::uint64_t left_;
};

__device__ void load_table(std::uint64_t* table, const std::uint64_t* model) {
  for (std::uint32_t i = threadIdx.x; i < kModelWords; i += kThreads) table[i] = model[i];
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 2)
    write_kernel(const __grid_constant__ detail::RegionBatch batch,
                 const __grid_constant__ DecodePass pass,
                 std::uint64_t pieces_per_slice) {
  __shared__ std::uint64_t table[kModelWords];
  const std::uint32_t count = min(pass.counts[0], pass.max_writes);
  if (PieceWalk::is_idle(count, batch.count, pieces_per_slice)) return;
  load_table(table, pass.model);
  PieceWalk at(count, batch.count, pieces_per_slice);
  for (; at.has_more(); at.next()) {
    const TokenWrite write = pass.writes[at.item()];
    const StridedRegion& region = batch.regions[at.region()];
    const TokenBytes bytes =
        token_bytes(region, write.block, write.first_token, write.tokens, pass.tokens_per_block);
    const std::uint64_t end = min(words_of(bytes.size_bytes), at.first_word() + kPieceWords);
    for (std::uint64_t i = at.first_word() + threadIdx.x % 32; i < end; i += 32) {
      store_word(bytes.at, bytes.size_bytes, i, kv_word(write.input, table, region.salt, i));
    }
  }
}

/// What this lane's words of one piece of a read add up to.
class Attention {
 public:
  __device__ Attention(const std::uint64_t* own, std::uint32_t position, std::uint64_t salt)
      : own_(own), salt_(salt), position_(position) {}

  __device__ std::uint64_t piece(const TokenBytes& bytes, std::uint64_t first_word) const {
    constexpr std::uint32_t kUnroll = 4;
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint64_t end = min(words_of(bytes.size_bytes), first_word + kPieceWords);
    std::uint64_t sum = 0;
    std::uint64_t i = first_word;
    const unsigned char* at = bytes.at + first_word * detail::kWordBytes;
    if (detail::is_aligned(at, sizeof(ulonglong2))) {
      const auto* pairs = reinterpret_cast<const ulonglong2*>(at) + lane;
      const std::uint64_t full = min(bytes.size_bytes / detail::kWordBytes, end);
      // Words of one round of all lanes: 32 pairs for each load in flight.
      constexpr std::uint64_t kRound = 64 * kUnroll;
      for (; i + kRound <= full; i += kRound, pairs += 32 * kUnroll) {
        ulonglong2 loaded[kUnroll];
#pragma unroll
        for (std::uint32_t k = 0; k < kUnroll; ++k) loaded[k] = pairs[k * 32];
#pragma unroll
        for (std::uint32_t k = 0; k < kUnroll; ++k) {
          const std::uint64_t word = i + 2 * (k * 32 + lane);
          sum += term(loaded[k].x, word) + term(loaded[k].y, word + 1);
        }
      }
    }
    for (i += lane; i < end; i += 32) sum += term(load_word(bytes.at, bytes.size_bytes, i), i);
    return sum;
  }

 private:
  __device__ std::uint64_t term(std::uint64_t word, std::uint64_t i) const {
    return attend_term(word, own_[(i + salt_) % kModelWords], position_, salt_, i);
  }

  const std::uint64_t* own_;
  std::uint64_t salt_;
  std::uint32_t position_;
};

/// Adds what all lanes of the warp have to the output of one sequence.
__device__ void add_output(const DecodePass& pass, std::uint32_t sequence, std::uint64_t value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xFFFFFFFFU, value, offset);
  }
  if (threadIdx.x % 32 == 0 && value != 0) add_to(pass.outputs[sequence], value);
}

__global__ void __launch_bounds__(kThreads, 2)
    read_kernel(const __grid_constant__ detail::RegionBatch batch,
                const __grid_constant__ DecodePass pass,
                std::uint64_t pieces_per_slice) {
  __shared__ std::uint64_t own[kModelWords];
  const std::uint32_t count = min(pass.counts[1], pass.max_reads);
  if (PieceWalk::is_idle(count, batch.count, pieces_per_slice)) return;
  load_table(own, pass.model + kModelWords);
  PieceWalk at(count, batch.count, pieces_per_slice);
  std::uint64_t sum = 0;
  std::uint32_t sequence = 0;
  for (; at.has_more(); at.next()) {
    const TokenRead read = pass.reads[at.item()];
    if (read.sequence >= pass.max_sequences) continue;
    if (read.sequence != sequence) {
      add_output(pass, sequence, sum);
      sum = 0;
      sequence = read.sequence;
    }
    const StridedRegion& region = batch.regions[at.region()];
    const TokenBytes bytes =
        token_bytes(region, read.block, read.first_token, read.tokens, pass.tokens_per_block);
    sum += Attention(own, read.position, region.salt).piece(bytes, at.first_word());
  }
  add_output(pass, sequence, sum);
}

// As many threads as there are sums, so that all words of a thread belong to the same one.
__global__ void __launch_bounds__(kModelWords, 2) fold_kernel(const unsigned char* source,
                                                              std::uint64_t size_bytes,
                                                              std::uint64_t seed,
                                                              std::uint64_t* sums) {
  constexpr std::uint32_t kUnroll = 4;
  const std::uint64_t words = words_of(size_bytes);
  const std::uint64_t step = std::uint64_t{gridDim.x} * kModelWords;
  std::uint64_t i = std::uint64_t{blockIdx.x} * kModelWords + threadIdx.x;
  std::uint64_t sum = 0;
  if (detail::is_aligned(source, detail::kWordBytes)) {
    const auto* aligned = reinterpret_cast<const std::uint64_t*>(source);
    const std::uint64_t full = size_bytes / detail::kWordBytes;
    for (; i + (kUnroll - 1) * step < full; i += kUnroll * step) {
      std::uint64_t loaded[kUnroll];
#pragma unroll
      for (std::uint32_t k = 0; k < kUnroll; ++k) loaded[k] = aligned[i + k * step];
#pragma unroll
      for (std::uint32_t k = 0; k < kUnroll; ++k) sum += fold_term(loaded[k], i + k * step, seed);
    }
  }
  for (; i < words; i += step) sum += fold_term(load_word(source, size_bytes, i), i, seed);
  if (sum != 0) add_to(sums[threadIdx.x], sum);
}

__global__ void __launch_bounds__(kThreads) expand_kernel(const unsigned char* source,
                                                          std::uint64_t source_bytes,
                                                          unsigned char* target,
                                                          std::uint64_t target_bytes) {
  const std::uint64_t source_words = words_of(source_bytes);
  const std::uint64_t target_words = words_of(target_bytes);
  const std::uint64_t step = std::uint64_t{gridDim.x} * kThreads;
  // Of two places in the source the next one follows without a division.
  const std::uint64_t source_step = step % source_words;
  std::uint64_t j = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  std::uint64_t from = j % source_words;
  for (; j < target_words; j += step) {
    const std::uint64_t word = load_word(source, source_bytes, from);
    store_word(target, target_bytes, j, expand_word(word, j));
    from += source_step;
    if (from >= source_words) from -= source_words;
  }
}

unsigned ctas_for(std::uint64_t work, std::uint64_t per_cta) {
  return static_cast<unsigned>(std::min<std::uint64_t>(kMaxCtas, (work + per_cta - 1) / per_cta));
}

using PassKernel = void (*)(detail::RegionBatch, DecodePass, std::uint64_t);

cudaError_t launch_pass(const StridedRegion* regions,
                        std::uint32_t region_count,
                        const DecodePass& pass,
                        std::uint32_t max_items,
                        PassKernel kernel,
                        cudaStream_t stream) {
  if (max_items == 0) return cudaSuccess;
  return detail::for_each_batch(regions, region_count, [&](const detail::RegionBatch& batch) {
    const std::uint64_t per_slice = (batch.max_slice_bytes + kPieceBytes - 1) / kPieceBytes;
    const unsigned ctas = ctas_for(max_items * per_slice * batch.count, 1);
    kernel<<<ctas, kThreads, 0, stream>>>(batch, pass, per_slice);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_decode(const StridedRegion* regions,
                          std::uint32_t region_count,
                          const DecodePass& pass,
                          cudaStream_t stream) {
  if (const cudaError_t error =
          launch_pass(regions, region_count, pass, pass.max_writes, write_kernel, stream);
      error != cudaSuccess) {
    return error;
  }
  const std::uint32_t max_reads = pass.max_sequences == 0 ? 0 : pass.max_reads;
  return launch_pass(regions, region_count, pass, max_reads, read_kernel, stream);
}

cudaError_t launch_fold(const unsigned char* source,
                        std::uint64_t size_bytes,
                        std::uint64_t seed,
                        std::uint64_t* sums,
                        cudaStream_t stream) {
  if (size_bytes == 0) return cudaSuccess;
  const unsigned ctas = ctas_for(words_of(size_bytes), kModelWords);
  fold_kernel<<<ctas, kModelWords, 0, stream>>>(source, size_bytes, seed, sums);
  return cudaGetLastError();
}

cudaError_t launch_expand(const unsigned char* source,
                          std::uint64_t source_bytes,
                          unsigned char* target,
                          std::uint64_t target_bytes,
                          cudaStream_t stream) {
  if (target_bytes == 0) return cudaSuccess;
  const unsigned ctas = ctas_for(words_of(target_bytes), kThreads);
  expand_kernel<<<ctas, kThreads, 0, stream>>>(source, source_bytes, target, target_bytes);
  return cudaGetLastError();
}

cudaError_t load_reference_model() {
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaSuccess;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, write_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, read_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, fold_kernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, expand_kernel);
  return error;
}

}  // namespace kvferry::kernels
