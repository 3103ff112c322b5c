// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_memory.hpp"

#include "device/host_mappers.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <vector>

namespace kvferry::ipc {
namespace {

void* raw(std::uintptr_t address) { return DevicePtr{address}.raw(); }

Result<std::uintptr_t> map_pages(
    void* at, std::uint64_t size_bytes, int protection, int flags, int fd) {
  void* const data = ::mmap(at, size_bytes, protection, flags, fd, 0);
  if (data == MAP_FAILED) return KVFERRY_ERRNO("map {} bytes", size_bytes);
  return reinterpret_cast<std::uintptr_t>(data);
}

/// The kernel's books know the object until the last descriptor and mapping of it are gone.
class HostMemoryTrace final : public MemoryTrace {
 public:
  HostMemoryTrace(std::string device_name, ObjectId object)
      : device_name_(std::move(device_name)), object_(std::move(object)) {}
  [[nodiscard]] Result<bool> is_kept() const override {
    KVFERRY_ASSIGN(const HostLedgerView view, read_host_ledger(device_name_));
    return view.object_bytes.contains(object_);
  }

 private:
  std::string device_name_;
  ObjectId object_;
};

constexpr int kNoMemory = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

/// One answer of the kernel instead of a look at every process: the seal against writing is granted
/// when no shared writable mapping is left, and imports are nothing else. False when it cannot be
/// told. The object is about to be freed: nobody is to write to it again.
bool is_mapped_by_nobody(int object) { return ::fcntl(object, F_ADD_SEALS, F_SEAL_WRITE) == 0; }

/// The rule that CUDA leaves undefined, enforced: legacy memory is freed only when no living
/// process maps it. Called after our own mapping is gone, so that a child that shares our address
/// space until its exec is no false alarm.
void require_unmapped(const std::string& device_name, int object, std::uint64_t size_bytes) {
  if (is_mapped_by_nobody(object)) return;
  const auto id = object_id(object);
  KVFERRY_CHECK(id.has_value(), "our own device memory has no inode");
  const auto mappers = find_mappers(*id);
  if (!mappers.has_value()) {
    log_error("host device {}: cannot check who maps inode {}: {}", device_name, id->second,
              mappers.error().message);
    return;
  }
  if (mappers->empty()) return;
  std::string report = fmt::format(
      "kvferry: host device {}: legacy memory of {} bytes (inode {}) is freed while living "
      "processes map it; CUDA leaves this undefined. Unlink every attacher before freeing.\n",
      device_name, size_bytes, id->second);
  for (const Mapper& mapper : *mappers) {
    report += fmt::format("kvferry:   pid {} ({}) maps {} bytes of inode {}\n", mapper.pid,
                          mapper.command, mapper.mapped_bytes, id->second);
  }
  // Straight to stderr: the report must appear whatever the log level is.
  // wait-brief: the reader of the last words of a process that aborts; nobody is owed anything by
  // it any more
  if (::write(STDERR_FILENO, report.data(), report.size()) < 0) log_error("{}", report);
  std::abort();
}

}  // namespace

Result<std::shared_ptr<HostReservation>> HostReservation::create(std::uint64_t size_bytes) {
  KVFERRY_ASSIGN(const std::uintptr_t address,
                 map_pages(nullptr, size_bytes, PROT_NONE, kNoMemory, -1));
  return std::make_shared<HostReservation>(address, size_bytes);
}

HostReservation::~HostReservation() { ::munmap(raw(address_), size_bytes_); }

Status HostReservation::map(int fd, std::uint64_t size_bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (size_bytes > size_bytes_) {
    return KVFERRY_ERROR(kInvalidArgument, "{} bytes do not fit an address range of {} bytes",
                         size_bytes, size_bytes_);
  }
  if (mapped_bytes_ != 0) {
    return KVFERRY_ERROR(kBusy,
                         "address range {:#x} holds {} bytes already; release them before mapping "
                         "{} bytes",
                         address_, mapped_bytes_, size_bytes);
  }
  KVFERRY_TRY(
      map_pages(raw(address_), size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd));
  mapped_bytes_ = size_bytes;
  return ok();
}

Status HostReservation::unmap() {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (mapped_bytes_ == 0) return ok();
  KVFERRY_TRY(map_pages(raw(address_), mapped_bytes_, PROT_NONE, kNoMemory | MAP_FIXED, -1));
  mapped_bytes_ = 0;
  return ok();
}

Result<std::shared_ptr<HostMapping>> HostMapping::create(int fd,
                                                         std::uint64_t size_bytes,
                                                         std::shared_ptr<HostReservation> at) {
  if (at != nullptr) {
    KVFERRY_TRY(at->map(fd, size_bytes));
    const std::uintptr_t address = at->address();
    return std::make_shared<HostMapping>(address, size_bytes, std::move(at));
  }
  KVFERRY_ASSIGN(const std::uintptr_t address,
                 map_pages(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd));
  return std::make_shared<HostMapping>(address, size_bytes, nullptr);
}

HostMapping::~HostMapping() {
  if (const Status status = unmap(); !status.has_value()) log_error("{}", status.error().message);
}

Status HostMapping::unmap() {
  if (!mapped_) return ok();
  if (at_ != nullptr) {
    KVFERRY_TRY(at_->unmap());
  } else if (::munmap(raw(address_), size_bytes_) != 0) {
    return KVFERRY_ERRNO("unmap {} bytes of device memory at {:#x}", size_bytes_, address_);
  }
  mapped_ = false;
  return ok();
}

HostMemory::HostMemory(std::string device_name,
                       HandleKind kind,
                       std::shared_ptr<HostMapping> mapping,
                       UniqueFd object)
    : device_name_(std::move(device_name)),
      kind_(kind),
      address_(mapping->address()),
      size_bytes_(mapping->size_bytes()),
      mapping_(std::move(mapping)),
      object_(std::move(object)) {
  if (!object_.valid()) return;
  allocations_ = HostAllocations::of_this_process();
  allocations_->add(address_, {device_name_, kind_, size_bytes_, object_.get()});
}

HostMemory::~HostMemory() {
  if (const Status status = release(); !status.has_value()) {
    log_error("host device {}: release of {} bytes: {}", device_name_, size_bytes_,
              status.error().message);
  }
}

std::unique_ptr<MemoryTrace> HostMemory::trace() const {
  if (!object_.valid()) return nullptr;
  const auto object = object_id(object_.get());
  if (!object.has_value()) return nullptr;
  return std::make_unique<HostMemoryTrace>(device_name_, *object);
}

Result<ExportedHandle> HostMemory::export_handle() {
  if (!object_.valid()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "host device {}: memory at {:#x} was imported or released; only its "
                         "allocator can export it",
                         device_name_, address_);
  }
  ExportedHandle handle;
  handle.kind = kind_;
  handle.size_bytes = size_bytes_;
  handle.fd = UniqueFd(::fcntl(object_.get(), F_DUPFD_CLOEXEC, 0));
  if (!handle.fd.valid()) return KVFERRY_ERRNO("host device {}: copy a descriptor", device_name_);
  return handle;
}

Result<std::vector<pid_t>> HostMemory::mapped_elsewhere() {
  std::vector<pid_t> pids;
  if (!object_.valid()) return pids;
  KVFERRY_ASSIGN(const ObjectId object, object_id(object_.get()));
  KVFERRY_ASSIGN(const std::vector<Mapper> mappers, find_mappers(object));
  for (const Mapper& mapper : mappers) {
    if (mapper.pid != ::getpid()) pids.push_back(mapper.pid);
  }
  return pids;
}

Status HostMemory::release() {
  if (mapping_ == nullptr) return ok();
  // Before the addresses are free for another allocation.
  if (allocations_ != nullptr) allocations_->remove(address_);
  // Other legacy imports of the object in this process keep the shared mapping.
  if (mapping_.use_count() == 1) KVFERRY_TRY(mapping_->unmap());
  mapping_.reset();
  if (object_.valid() && kind_ == HandleKind::kLegacy) {
    require_unmapped(device_name_, object_.get(), size_bytes_);
  }
  object_.reset();
  return ok();
}

}  // namespace kvferry::ipc
