// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::cli {

/// What a driver rounds and caches on its own behalf while other processes come and go.
inline constexpr std::uint64_t kDriverNoiseBytes = 4ULL << 20;

/// Free memory of one device.
struct DeviceFree {
  std::string device;  ///< As DeviceSpec::to_string().
  std::uint64_t free_bytes = 0;
};

/// Looks from outside whether the devices have all their memory back. Opens CUDA devices before any
/// child starts and keeps them open, so that its own context counts on both sides.
class DeviceProbe {
 public:
  /// Throws Exception when a device cannot be opened.
  explicit DeviceProbe(const std::vector<ipc::DeviceSpec>& devices);

  /// Free memory of the CUDA devices together, as seen now; 0 for host devices.
  [[nodiscard]] std::uint64_t smallest_free_bytes() const noexcept { return smallest_free_; }
  /// Free memory of each distinct device now, in the order in which ranks first name them. A pure
  /// observation, at any time.
  [[nodiscard]] ipc::Result<std::vector<DeviceFree>> free_now() const;
  /// Bytes that are still taken, as seen now. Once all children have ended that is what they
  /// leaked, but a driver gives memory of ended processes back a moment later, and nothing
  /// announces it: look again.
  [[nodiscard]] ipc::Result<std::uint64_t> taken_bytes() const;

 private:
  struct HostDevice {
    std::string spec;
    std::string name;
    std::uint64_t capacity = 0;
  };
  struct CudaDevice {
    std::string spec;
    std::unique_ptr<ipc::Device> device;
    std::uint64_t free_before = 0;
  };

  std::vector<HostDevice> host_;
  std::vector<CudaDevice> cuda_;
  std::uint64_t smallest_free_ = 0;
};

/// Remembers the anonymous shared memory of the children, and finds out who still holds it. What a
/// child holds alone goes with it; what matters is memory that it shares, and that is seen at its
/// peers, too: so look at all of them when they have found each other and when one of them dies.
class HostMemoryProbe {
 public:
  /// Notes what a living child holds open or has mapped. Finding nothing is no error: a dead one,
  /// reaped or not, has nothing any more.
  void observe(pid_t child);
  /// Bytes of noted memory that some process still holds. @pre all children have ended.
  [[nodiscard]] std::uint64_t leaked_bytes() const;

 private:
  std::set<std::uint64_t> inodes_;
};

}  // namespace kvferry::cli
