// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/arena_source.hpp"
#include "kvferry/worker/caching_allocator.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace kvferry::worker {

/// The memory of the reference worker when it plays an engine that allocates its KV tensors by
/// itself: from a caching allocator (a pool of its own, as serving engines keep one for the cache),
/// one tensor per layer with K and V in it, one for each other region, and one per group in
/// kBlockFirst. Small ones share a segment, so that many regions lie in one allocation.
/// @threading one at a time.
class EngineRegions final : public ipc::ArenaSource {
 public:
  EngineRegions(ipc::Device& device, ipc::HandleKind handles);
  EngineRegions(const EngineRegions&) = delete;
  EngineRegions& operator=(const EngineRegions&) = delete;
  /// Leaves the memory of epochs that were never released as it is: a peer may map it.
  ~EngineRegions() override;

  [[nodiscard]] ipc::Result<std::vector<ipc::RegionMemory>> allocate(
      const ipc::ArenaRequest& request) override;
  [[nodiscard]] ipc::Status release(ipc::Epoch epoch) override;

 private:
  using Tensors = std::vector<ScratchBuffer>;
  [[nodiscard]] ipc::Status add_tensor(const ipc::ArenaRequest& request,
                                       std::size_t first,
                                       std::size_t count,
                                       Tensors& tensors,
                                       std::vector<ipc::RegionMemory>& regions);
  [[nodiscard]] ipc::Status add_group(const ipc::ArenaRequest& request,
                                      std::size_t first,
                                      std::size_t count,
                                      Tensors& tensors,
                                      std::vector<ipc::RegionMemory>& regions);

  std::unique_ptr<CachingAllocator> pool_;
  std::map<std::uint64_t, Tensors> epochs_;  ///< Not released.
};

}  // namespace kvferry::worker
