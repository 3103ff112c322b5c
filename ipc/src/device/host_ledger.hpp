// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace kvferry::ipc {

/// Sizes and capacities share one lock offset with a 61-bit hash of the device; see HostLedger.
inline constexpr std::uint64_t kMaxHostCapacity = 1ULL << 60;

/// kInvalidArgument unless the name is [A-Za-z0-9._-]{1,64}.
[[nodiscard]] Status check_host_name(std::string_view name);

/// Device and inode number: what the kernel calls one memory object.
using ObjectId = std::pair<std::uint64_t, std::uint64_t>;

/// One look at the kernel's books about one host device.
struct HostLedgerView {
  std::map<ObjectId, std::uint64_t> object_bytes;  ///< Living memory objects.
  std::set<std::uint64_t> capacities;              ///< Claimed by those who have it open.

  [[nodiscard]] std::uint64_t used_bytes() const noexcept;
  friend bool operator==(const HostLedgerView&, const HostLedgerView&) = default;
};

/// Reads /proc/locks. known: claims that the caller holds, and which a look at the books therefore
/// has to show. @threading any.
[[nodiscard]] Result<HostLedgerView> read_host_ledger(std::string_view name,
                                                      const HostLedgerView& known = {});

/// The books of one host device, kept by the kernel alone.
///
/// Every allocation is a memfd whose open file carries two record locks (OFD): one whose length is
/// the allocation's size, one whose length is the device's capacity, both at offsets made from a
/// hash of user, pid namespace and device name. A record lock of this kind lives exactly as long as
/// the open file: while any process holds a descriptor of it, maps it, or has it in flight in a
/// socket. Importers share the open file. So the sum over /proc/locks is exact whatever dies, needs
/// no name anywhere, and one read is independent of how many processes there are.
/// @threading any.
class HostLedger {
 public:
  /// Throws Exception (kAlreadyExists) when the name is in use with another capacity.
  HostLedger(std::string name, std::uint64_t capacity_bytes);

  /// A new memory object: pages are there, size is sealed. kNoDeviceMemory when the device (or
  /// this machine) has not that much left.
  [[nodiscard]] Result<UniqueFd> create_object(std::uint64_t size_bytes, HandleKind kind) const;
  /// kProtocol unless fd is a living, sealed memory object of this device with that size and kind.
  [[nodiscard]] Status check_object(int fd, std::uint64_t size_bytes, HandleKind kind) const;
  [[nodiscard]] Result<MemoryInfo> memory_info() const;

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] std::uint64_t capacity_bytes() const noexcept { return capacity_bytes_; }

 private:
  [[nodiscard]] std::string object_name(std::uint64_t size_bytes, HandleKind kind) const;
  /// Puts the object into the books, or kNoDeviceMemory.
  [[nodiscard]] Status claim(int fd, std::uint64_t size_bytes) const;

  std::string name_;
  std::uint64_t capacity_bytes_ = 0;
  UniqueFd presence_;  ///< An empty object: claims the capacity while this device is open here.
};

/// Which memory object a descriptor is.
[[nodiscard]] Result<ObjectId> object_id(int fd);

}  // namespace kvferry::ipc
