// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "engine_regions.hpp"

#include "kvferry/ipc/base/keep.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <utility>

namespace kvferry::worker {

using ipc::ArenaRequest;
using ipc::RegionKind;
using ipc::RegionMemory;
using ipc::RegionRequest;
using ipc::Result;
using ipc::Status;

namespace {

constexpr std::uint64_t kTensorAlignment = 256;

/// Bytes of a region whose blocks touch; at most kMaxArenaBytes, as the plan was checked.
std::uint64_t region_bytes(const RegionRequest& region) {
  return region.block_bytes * region.block_count;
}

bool is_pair(const RegionRequest& key, const RegionRequest& value) {
  return key.kind == RegionKind::kKey && value.kind == RegionKind::kValue &&
         key.layer == value.layer && key.group == value.group;
}

}  // namespace

EngineRegions::EngineRegions(ipc::Device& device, ipc::HandleKind handles)
    : pool_(std::make_unique<CachingAllocator>(device, handles)) {}

EngineRegions::~EngineRegions() {
  if (epochs_.empty()) return;
  ipc::log_error(
      "engine: memory of {} epochs, from epoch {} on, was never released; left to the "
      "end of this process",
      epochs_.size(), epochs_.begin()->first);
  ipc::keep_until_process_end(std::move(epochs_));
  ipc::keep_until_process_end(std::move(pool_));
}

/// One tensor that holds regions [first, + count), one behind the other.
Status EngineRegions::add_tensor(const ArenaRequest& request,
                                 std::size_t first,
                                 std::size_t count,
                                 Tensors& tensors,
                                 std::vector<RegionMemory>& regions) {
  std::uint64_t size_bytes = 0;
  for (std::size_t i = first; i < first + count; ++i) {
    size_bytes += ipc::align_up(region_bytes(request.regions[i]), kTensorAlignment);
  }
  KVFERRY_ASSIGN(ScratchBuffer tensor, pool_->allocate(size_bytes));
  std::uint64_t offset = 0;
  for (std::size_t i = first; i < first + count; ++i) {
    const RegionRequest& region = request.regions[i];
    regions.push_back(
        {tensor.address() + offset, region_bytes(region), region.block_bytes, region.block_bytes});
    offset += ipc::align_up(region_bytes(region), kTensorAlignment);
  }
  tensors.push_back(std::move(tensor));
  return ipc::ok();
}

/// One tensor for a group whose blocks are one run each: what is replicated first.
Status EngineRegions::add_group(const ArenaRequest& request,
                                std::size_t first,
                                std::size_t count,
                                Tensors& tensors,
                                std::vector<RegionMemory>& regions) {
  std::uint64_t stride = 0;
  for (std::size_t i = first; i < first + count; ++i) stride += request.regions[i].block_bytes;
  const std::uint64_t size_bytes = stride * request.regions[first].block_count;
  KVFERRY_ASSIGN(ScratchBuffer tensor, pool_->allocate(size_bytes));
  const std::size_t base = regions.size();
  regions.resize(base + count);
  std::uint64_t offset = 0;
  for (const bool replicated : {true, false}) {
    for (std::size_t i = 0; i < count; ++i) {
      const RegionRequest& region = request.regions[first + i];
      if (region.replicated != replicated) continue;
      regions[base + i] = {tensor.address() + offset, size_bytes - offset, region.block_bytes,
                           stride};
      offset += region.block_bytes;
    }
  }
  tensors.push_back(std::move(tensor));
  return ipc::ok();
}

Result<std::vector<RegionMemory>> EngineRegions::allocate(const ArenaRequest& request) {
  Tensors tensors;
  std::vector<RegionMemory> regions;
  for (std::size_t i = 0; i < request.regions.size();) {
    std::size_t count = 1;
    if (request.order == ipc::ArenaOrder::kBlockFirst) {
      while (i + count < request.regions.size() &&
             request.regions[i + count].group == request.regions[i].group) {
        ++count;
      }
      KVFERRY_TRY(add_group(request, i, count, tensors, regions));
    } else {
      const bool pair =
          i + 1 < request.regions.size() && is_pair(request.regions[i], request.regions[i + 1]);
      count = pair ? 2 : 1;
      KVFERRY_TRY(add_tensor(request, i, count, tensors, regions));
    }
    i += count;
  }
  const AllocatorStats stats = pool_->stats();
  ipc::log_info("engine: epoch {}: {} tensors for {} regions, {} in {} segments",
                request.epoch.value, tensors.size(), regions.size(),
                ipc::format_size(stats.reserved_bytes), stats.segments);
  epochs_[request.epoch.value] = std::move(tensors);
  return regions;
}

Status EngineRegions::release(ipc::Epoch epoch) {
  if (epochs_.erase(epoch.value) == 0) {
    return KVFERRY_ERROR(kNotFound, "engine: epoch {} has no tensors", epoch.value);
  }
  pool_->empty_cache(EmptyReason::kClear);
  return ipc::ok();
}

}  // namespace kvferry::worker
