// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_device.hpp"

#include "device/host_borrowed.hpp"
#include "device/host_broadcast.hpp"
#include "device/host_stream.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <fmt/format.h>
#include <sys/utsname.h>

#include <iterator>
#include <limits>
#include <utility>

namespace kvferry::ipc {
namespace {

/// That of CUDA's VMM allocations, so that code meets the same rounding with and without a GPU.
constexpr std::uint64_t kGranularity = 2ULL << 20;

class HostRegionTable final : public RegionTable {
 public:
  explicit HostRegionTable(std::vector<kernels::StridedRegion> regions) noexcept
      : regions_(std::move(regions)) {}
  [[nodiscard]] std::span<const kernels::StridedRegion> regions() const noexcept override {
    return regions_;
  }

 private:
  std::vector<kernels::StridedRegion> regions_;
};

class HostPinnedBuffer final : public PinnedBuffer {
 public:
  explicit HostPinnedBuffer(std::uint64_t size_bytes)
      : words_((size_bytes + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t)),
        size_bytes_(size_bytes) {}
  [[nodiscard]] std::byte* data() noexcept override {
    return reinterpret_cast<std::byte*>(words_.data());
  }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override { return size_bytes_; }

 private:
  std::vector<std::uint64_t> words_;
  std::uint64_t size_bytes_;
};

bool valid_kind(HandleKind kind) { return kind == HandleKind::kLegacy || kind == HandleKind::kVmm; }

}  // namespace

HostDevice::HostDevice(const DeviceSpec& spec)
    : spec_(spec), ledger_(spec.host_name, spec.host_capacity_bytes) {}

std::string HostDevice::name() const { return fmt::format("host device {}", spec_.host_name); }

Result<DeviceIdentity> HostDevice::identity() const {
  utsname machine{};
  if (::uname(&machine) != 0) return KVFERRY_ERRNO("uname");
  DeviceIdentity identity;
  identity.name = "simulated device in host memory";
  identity.uuid = fmt::format("host-{}", machine.nodename);
  identity.link = fmt::format("memcpy, {}", machine.machine);
  identity.driver = fmt::format("Linux {}", machine.release);
  return identity;
}

std::uint64_t HostDevice::allocation_granularity() const noexcept { return kGranularity; }

Result<std::unique_ptr<AddressRange>> HostDevice::reserve(std::uint64_t size_bytes) {
  if (size_bytes == 0 || size_bytes > kMaxHostCapacity) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: cannot reserve {} bytes of addresses", name(),
                         size_bytes);
  }
  KVFERRY_ASSIGN(auto reservation, HostReservation::create(align_up(size_bytes, kGranularity)));
  return std::unique_ptr<AddressRange>(std::make_unique<HostAddressRange>(std::move(reservation)));
}

Result<std::shared_ptr<HostReservation>> HostDevice::target_of(AddressRange* at,
                                                               HandleKind kind) const {
  if (at == nullptr) return std::shared_ptr<HostReservation>();
  if (kind != HandleKind::kVmm) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{}: {} memory cannot be mapped at a reserved address; use vmm handles",
                         name(), ipc::to_string(kind));
  }
  const auto* range = dynamic_cast<const HostAddressRange*>(at);
  if (range == nullptr) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: the address range is of another kind of device",
                         name());
  }
  return range->reservation();
}

Result<std::unique_ptr<DeviceMemory>> HostDevice::allocate(std::uint64_t size_bytes,
                                                           HandleKind kind,
                                                           AddressRange* at) {
  if (size_bytes == 0 || !valid_kind(kind)) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: cannot allocate {} bytes of {} memory", name(),
                         size_bytes, ipc::to_string(kind));
  }
  KVFERRY_ASSIGN(auto target, target_of(at, kind));
  const std::uint64_t rounded = size_bytes > kMaxHostCapacity
                                    ? std::numeric_limits<std::uint64_t>::max()
                                    : align_up(size_bytes, kGranularity);
  KVFERRY_ASSIGN(UniqueFd object, ledger_.create_object(rounded, kind));
  KVFERRY_ASSIGN(auto mapping, HostMapping::create(object.get(), rounded, std::move(target)));
  return std::unique_ptr<DeviceMemory>(
      std::make_unique<HostMemory>(spec_.host_name, kind, std::move(mapping), std::move(object)));
}

Result<std::shared_ptr<HostMapping>> HostDevice::map_import(
    const ExportedHandle& handle, std::shared_ptr<HostReservation> target) {
  if (handle.kind == HandleKind::kVmm) {
    return HostMapping::create(handle.fd.get(), handle.size_bytes, std::move(target));
  }
  KVFERRY_ASSIGN(const ObjectId id, object_id(handle.fd.get()));
  const std::lock_guard<std::mutex> guard(mutex_);
  std::erase_if(legacy_imports_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto known = legacy_imports_.find(id); known != legacy_imports_.end()) {
    if (auto mapping = known->second.lock(); mapping != nullptr) return mapping;
  }
  KVFERRY_ASSIGN(auto mapping, HostMapping::create(handle.fd.get(), handle.size_bytes, nullptr));
  legacy_imports_[id] = mapping;
  return mapping;
}

Result<std::unique_ptr<DeviceMemory>> HostDevice::import(ExportedHandle handle, AddressRange* at) {
  if (!handle.fd.valid() || !handle.token.empty() || !valid_kind(handle.kind) ||
      handle.size_bytes == 0) {
    return KVFERRY_ERROR(kProtocol,
                         "{}: a handle of {} kind with {} bytes, a token of {} bytes and {} "
                         "descriptor is none of a host device",
                         name(), ipc::to_string(handle.kind), handle.size_bytes,
                         handle.token.size(), handle.fd.valid() ? "a" : "no");
  }
  KVFERRY_ASSIGN(auto target, target_of(at, handle.kind));
  KVFERRY_TRY(ledger_.check_object(handle.fd.get(), handle.size_bytes, handle.kind));
  KVFERRY_ASSIGN(auto mapping, map_import(handle, std::move(target)));
  return std::unique_ptr<DeviceMemory>(
      std::make_unique<HostMemory>(spec_.host_name, handle.kind, std::move(mapping), UniqueFd()));
}

Result<std::unique_ptr<BorrowedMemory>> HostDevice::borrow(DevicePtr address) {
  return borrow_host_memory(spec_.host_name, address);
}

Result<std::unique_ptr<Stream>> HostDevice::make_stream(StreamPriority /*priority*/) {
  return std::unique_ptr<Stream>(std::make_unique<HostStream>(name()));
}

Result<std::unique_ptr<RegionTable>> HostDevice::make_region_table(
    std::vector<kernels::StridedRegion> regions) {
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const kernels::StridedRegion& region = regions[i];
    if (region.base == nullptr || region.block_bytes == 0 ||
        region.block_stride < region.block_bytes) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "{}: region {} has base {}, {} bytes per block and a stride of {}; "
                           "needs a base, bytes > 0 and stride >= bytes",
                           name(), i, fmt::ptr(region.base), region.block_bytes,
                           region.block_stride);
    }
  }
  return std::unique_ptr<RegionTable>(std::make_unique<HostRegionTable>(std::move(regions)));
}

Result<std::unique_ptr<PinnedBuffer>> HostDevice::make_pinned_buffer(std::uint64_t size_bytes) {
  constexpr std::uint64_t kMaxPinned = 64ULL << 30;
  if (size_bytes == 0 || size_bytes > kMaxPinned) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: cannot make a pinned buffer of {} bytes", name(),
                         size_bytes);
  }
  return std::unique_ptr<PinnedBuffer>(std::make_unique<HostPinnedBuffer>(size_bytes));
}

Status HostDevice::register_host(void* data, std::uint64_t size_bytes) {
  const auto start = reinterpret_cast<std::uintptr_t>(data);
  std::uint64_t end = 0;
  if (data == nullptr || size_bytes == 0 || !checked_add(start, size_bytes, end)) {
    return KVFERRY_ERROR(kInvalidArgument, "{}: cannot register {} bytes at {}", name(), size_bytes,
                         fmt::ptr(data));
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto next = registered_.lower_bound(start);
  const auto before = next == registered_.begin() ? registered_.end() : std::prev(next);
  const bool hits_next = next != registered_.end() && next->first < end;
  const bool hits_before = before != registered_.end() && before->first + before->second > start;
  if (hits_next || hits_before) {
    const auto& other = hits_next ? *next : *before;
    return KVFERRY_ERROR(kAlreadyExists,
                         "{}: {} bytes at {:#x} overlap the {} bytes registered at {:#x}", name(),
                         size_bytes, start, other.second, other.first);
  }
  registered_.emplace(start, size_bytes);
  return ok();
}

Status HostDevice::unregister_host(void* data) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (registered_.erase(reinterpret_cast<std::uintptr_t>(data)) == 0) {
    return KVFERRY_ERROR(kNotFound, "{}: nothing is registered at {}", name(), fmt::ptr(data));
  }
  return ok();
}

Result<BroadcastPort> HostDevice::broadcast_port() {
  return BroadcastPort{kHostTransport, spec_.host_name, {}};
}

Result<std::unique_ptr<BroadcastRoot>> HostDevice::open_broadcast() {
  return open_host_broadcast();
}

Result<std::unique_ptr<BroadcastGroup>> HostDevice::join_broadcast(const BroadcastSeat& seat,
                                                                   const BroadcastWait& wait) {
  return join_host_broadcast(seat, wait);
}

}  // namespace kvferry::ipc
