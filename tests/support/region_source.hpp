// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/lease/arena_source.hpp"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace kvferry::test {

/// An engine that puts the regions of an epoch into a few allocations of a device, each with room
/// before, between and behind them, and does on request what engines must not do.
class RegionSource : public ipc::ArenaSource {
 public:
  static constexpr std::uint64_t kMargin = 4096;  ///< Before the first region and after each.

  RegionSource(ipc::Device& device, ipc::HandleKind kind, std::size_t regions_each = 2)
      : device_(device), kind_(kind), regions_each_(regions_each) {}

  ipc::Result<std::vector<ipc::RegionMemory>> allocate(const ipc::ArenaRequest& request) override {
    ++allocates;
    if (before_allocate) KVFERRY_TRY(before_allocate());
    auto& kept = epochs_[request.epoch.value];
    std::vector<ipc::RegionMemory> regions;
    for (std::size_t first = 0; first < request.regions.size(); first += regions_each_) {
      const std::size_t end = std::min(first + regions_each_, request.regions.size());
      std::uint64_t size = kMargin + extra_bytes;
      for (std::size_t i = first; i < end; ++i) size += bytes(request.regions[i]) + kMargin;
      KVFERRY_ASSIGN(auto memory, device_.allocate(size, kind_, nullptr));
      std::uint64_t offset = kMargin;
      for (std::size_t i = first; i < end; ++i) {
        const std::uint64_t block = request.regions[i].block_bytes;
        regions.push_back({memory->address() + offset, bytes(request.regions[i]), block, block});
        offset += bytes(request.regions[i]) + kMargin;
      }
      kept.push_back(std::move(memory));
    }
    if (mend) mend(regions);
    return regions;
  }

  ipc::Status release(ipc::Epoch epoch) override {
    ++releases[epoch.value];
    if (before_release) KVFERRY_TRY(before_release());
    if (!keeps_memory) epochs_.erase(epoch.value);
    return ipc::ok();
  }

  void free_all() { epochs_.clear(); }
  [[nodiscard]] const std::vector<std::unique_ptr<ipc::DeviceMemory>>& memory_of(
      std::uint64_t epoch) {
    return epochs_[epoch];
  }
  [[nodiscard]] int release_count(std::uint64_t epoch) { return releases[epoch]; }

  int allocates = 0;
  std::uint64_t extra_bytes = 0;                              ///< At the end of each allocation.
  std::map<std::uint64_t, int> releases;                      ///< By epoch.
  std::function<void(std::vector<ipc::RegionMemory>&)> mend;  ///< What is given instead.
  std::function<ipc::Status()> before_allocate;               ///< May fail or throw.
  std::function<ipc::Status()> before_release;                ///< May fail or throw.
  bool keeps_memory = false;                                  ///< release() frees nothing.

 private:
  static std::uint64_t bytes(const ipc::RegionRequest& region) {
    return region.block_bytes * region.block_count;
  }

  ipc::Device& device_;
  ipc::HandleKind kind_;
  std::size_t regions_each_;
  std::map<std::uint64_t, std::vector<std::unique_ptr<ipc::DeviceMemory>>> epochs_;
};

}  // namespace kvferry::test
