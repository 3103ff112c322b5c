// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace kvferry::ipc {

/// Memory of a host device that lives in this process.
struct HostAllocation {
  std::string device_name;
  HandleKind kind = HandleKind::kVmm;
  std::uint64_t size_bytes = 0;
  int object = -1;  ///< The allocator's descriptor; valid while it is in the table.
};

/// What a driver knows of its process: which allocation an address lies in, whoever made it.
/// @threading any.
class HostAllocations {
 public:
  /// Shared by all host devices; allocations keep it, so it outlives them at exit.
  [[nodiscard]] static std::shared_ptr<HostAllocations> of_this_process();

  void add(std::uintptr_t address, HostAllocation allocation);
  void remove(std::uintptr_t address);

  struct Found {
    std::uintptr_t address = 0;
    HostAllocation allocation;
  };
  /// The allocation that contains the address.
  [[nodiscard]] std::optional<Found> find(std::uintptr_t address) const;
  /// A descriptor of our own of the allocation at exactly this address; kNotFound when it is gone.
  [[nodiscard]] Result<UniqueFd> duplicate(std::uintptr_t address) const;

 private:
  mutable std::mutex mutex_;  ///< Guards the map, and the descriptors in it against closing.
  std::map<std::uintptr_t, HostAllocation> allocations_;  ///< By address.
};

}  // namespace kvferry::ipc
