// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_allocations.hpp"

#include <fcntl.h>

#include <iterator>
#include <utility>

namespace kvferry::ipc {

std::shared_ptr<HostAllocations> HostAllocations::of_this_process() {
  static const auto kTable = std::make_shared<HostAllocations>();
  return kTable;
}

void HostAllocations::add(std::uintptr_t address, HostAllocation allocation) {
  const std::lock_guard lock(mutex_);
  const bool added = allocations_.emplace(address, std::move(allocation)).second;
  KVFERRY_CHECK(added, "two living allocations at one address");
}

void HostAllocations::remove(std::uintptr_t address) {
  const std::lock_guard lock(mutex_);
  allocations_.erase(address);
}

std::optional<HostAllocations::Found> HostAllocations::find(std::uintptr_t address) const {
  const std::lock_guard lock(mutex_);
  const auto after = allocations_.upper_bound(address);
  if (after == allocations_.begin()) return std::nullopt;
  const auto& [start, allocation] = *std::prev(after);
  if (address - start >= allocation.size_bytes) return std::nullopt;
  return Found{start, allocation};
}

Result<UniqueFd> HostAllocations::duplicate(std::uintptr_t address) const {
  const std::lock_guard lock(mutex_);
  const auto found = allocations_.find(address);
  if (found == allocations_.end()) {
    return KVFERRY_ERROR(kNotFound, "the allocation at {:#x} was freed", address);
  }
  UniqueFd copy(::fcntl(found->second.object, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return KVFERRY_ERRNO("copy a descriptor of device memory");
  return copy;
}

}  // namespace kvferry::ipc
