// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_borrowed.hpp"

#include "device/host_allocations.hpp"
#include "device/host_ledger.hpp"
#include "device/host_mappers.hpp"

#include <unistd.h>

#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

/// Holds no descriptor of its own: that would keep the memory in the device's books.
class HostBorrowed final : public BorrowedMemory {
 public:
  HostBorrowed(HostAllocations::Found found, ObjectId object)
      : found_(std::move(found)), object_(std::move(object)) {}

  [[nodiscard]] DevicePtr address() const noexcept override { return DevicePtr{found_.address}; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override {
    return found_.allocation.size_bytes;
  }
  [[nodiscard]] HandleKind kind() const noexcept override { return found_.allocation.kind; }
  [[nodiscard]] AllocationId id() const noexcept override {
    return AllocationId{object_.first, object_.second};
  }

  [[nodiscard]] Result<ExportedHandle> export_handle() override {
    if (released_) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "host device {}: borrowed memory at {:#x} was given back",
                           found_.allocation.device_name, found_.address);
    }
    ExportedHandle handle;
    handle.kind = kind();
    handle.size_bytes = size_bytes();
    KVFERRY_ASSIGN(handle.fd, HostAllocations::of_this_process()->duplicate(found_.address));
    KVFERRY_ASSIGN(const ObjectId now, object_id(handle.fd.get()));
    if (now != object_) {
      return KVFERRY_ERROR(kNotFound,
                           "host device {}: the memory at {:#x} was freed and replaced while it "
                           "was lent; free it in release() only",
                           found_.allocation.device_name, found_.address);
    }
    return handle;
  }

  [[nodiscard]] Result<std::vector<pid_t>> mapped_elsewhere() override {
    KVFERRY_ASSIGN(const std::vector<Mapper> mappers, find_mappers(object_));
    std::vector<pid_t> pids;
    for (const Mapper& mapper : mappers) {
      if (mapper.pid != ::getpid()) pids.push_back(mapper.pid);
    }
    return pids;
  }

  [[nodiscard]] Result<bool> still_allocated() override {
    KVFERRY_ASSIGN(const HostLedgerView view, read_host_ledger(found_.allocation.device_name));
    return view.object_bytes.contains(object_);
  }

  [[nodiscard]] Status release() override {
    released_ = true;
    return ok();
  }

 private:
  HostAllocations::Found found_;
  ObjectId object_;
  bool released_ = false;
};

}  // namespace

Result<std::unique_ptr<BorrowedMemory>> borrow_host_memory(const std::string& device_name,
                                                           DevicePtr address) {
  auto found = HostAllocations::of_this_process()->find(address.address);
  if (!found) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "host device {}: {:#x} lies in no memory that this process allocated on "
                         "a host device; allocate it through ipc::Device",
                         device_name, address.address);
  }
  if (found->allocation.device_name != device_name) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{:#x} lies on host device {}, this rank uses host device {}; allocate "
                         "it there",
                         address.address, found->allocation.device_name, device_name);
  }
  KVFERRY_ASSIGN(const UniqueFd object,
                 HostAllocations::of_this_process()->duplicate(found->address));
  KVFERRY_ASSIGN(const ObjectId id, object_id(object.get()));
  return std::unique_ptr<BorrowedMemory>(std::make_unique<HostBorrowed>(*std::move(found), id));
}

}  // namespace kvferry::ipc
