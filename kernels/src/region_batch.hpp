// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/kernels/block_layout.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace kvferry::kernels::detail {

/// Regions as a kernel parameter. Parameters of up to 32,764 bytes are allowed from sm_70 and CUDA
/// 12.1 on (CUDA C++ programming guide, "Function parameters"); half of that keeps launches cheap.
inline constexpr std::uint32_t kMaxRegionsPerLaunch = 384;

struct RegionBatch {
  std::uint32_t count;
  std::uint32_t first;            ///< Index of regions[0] in the whole list.
  std::uint64_t max_slice_bytes;  ///< Longest slice in this batch.
  StridedRegion regions[kMaxRegionsPerLaunch];
};

static_assert(sizeof(RegionBatch) + sizeof(SeededBlocks) < 32'000, "must fit the parameter space");

/// Calls launch(batch) for each batch of the list until one fails.
template <typename Launch>
cudaError_t for_each_batch(const StridedRegion* regions, std::uint32_t count, Launch launch) {
  for (std::uint32_t first = 0; first < count; first += kMaxRegionsPerLaunch) {
    RegionBatch batch{};
    batch.count = std::min(kMaxRegionsPerLaunch, count - first);
    batch.first = first;
    for (std::uint32_t i = 0; i < batch.count; ++i) {
      batch.regions[i] = regions[first + i];
      batch.max_slice_bytes = std::max(batch.max_slice_bytes, batch.regions[i].block_bytes);
    }
    if (const cudaError_t error = launch(batch); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace kvferry::kernels::detail
