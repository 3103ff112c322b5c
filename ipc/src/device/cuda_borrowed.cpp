// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_memory.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <optional>
#include <utility>

namespace kvferry::ipc {
namespace {

/// The driver's own number of an allocation; nothing when no allocation is at the address.
Result<std::optional<std::uint64_t>> buffer_id(const CudaContext& context, CUdeviceptr address) {
  std::uint64_t id = 0;
  const CUresult error =
      context.driver().pointer_attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address);
  if (error == CUDA_ERROR_INVALID_VALUE) return std::optional<std::uint64_t>();
  KVFERRY_DRIVER_TRY(context.driver(), error);
  return std::optional<std::uint64_t>(id);
}

/// Memory that this process allocated without kvferry.
class CudaBorrowed final : public BorrowedMemory {
 public:
  /// generic: what VMM memory is exported by, retained for us; 0 for cudaMalloc memory.
  CudaBorrowed(ContextPtr context,
               CUdeviceptr base,
               std::uint64_t size_bytes,
               std::uint64_t id,
               CUmemGenericAllocationHandle generic)
      : context_(std::move(context)),
        base_(base),
        size_bytes_(size_bytes),
        id_(id),
        generic_(generic),
        kind_(generic == 0 ? HandleKind::kLegacy : HandleKind::kVmm) {}
  CudaBorrowed(const CudaBorrowed&) = delete;
  CudaBorrowed& operator=(const CudaBorrowed&) = delete;
  ~CudaBorrowed() override {
    if (const Status status = release(); !status) {
      log_error("borrowed device memory of {} not let go: {}", format_size(size_bytes_),
                status.error().to_string());
    }
  }

  [[nodiscard]] DevicePtr address() const noexcept override { return DevicePtr{base_}; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override { return size_bytes_; }
  [[nodiscard]] HandleKind kind() const noexcept override { return kind_; }
  [[nodiscard]] AllocationId id() const noexcept override {
    return AllocationId{static_cast<std::uint64_t>(context_->ordinal()), id_};
  }

  [[nodiscard]] Result<ExportedHandle> export_handle() override {
    if (released_) {
      return KVFERRY_ERROR(kInvalidArgument, "cuda:{}: borrowed memory at {:#x} was given back",
                           context_->ordinal(), base_);
    }
    const DeviceGuard guard(*context_);
    // A freed allocation's addresses may belong to another one by now.
    KVFERRY_ASSIGN(const auto now, buffer_id(*context_, base_));
    if (now != id_) {
      return KVFERRY_ERROR(kNotFound,
                           "cuda:{}: the memory at {:#x} was freed while it was lent; free it in "
                           "release() only",
                           context_->ordinal(), base_);
    }
    return kind_ == HandleKind::kLegacy ? export_legacy(address(), size_bytes_)
                                        : export_vmm(*context_, generic_, size_bytes_);
  }

  [[nodiscard]] Result<bool> still_allocated() override {
    const DeviceGuard guard(*context_);
    KVFERRY_ASSIGN(const auto now, buffer_id(*context_, base_));
    return now == id_;
  }

  [[nodiscard]] Status release() override {
    released_ = true;
    if (generic_ == 0) return ok();
    const DeviceGuard guard(*context_);
    KVFERRY_DRIVER_TRY(context_->driver(),
                       context_->driver().mem_release(std::exchange(generic_, 0)));
    return ok();
  }

 private:
  ContextPtr context_;
  CUdeviceptr base_;
  std::uint64_t size_bytes_;
  std::uint64_t id_;
  CUmemGenericAllocationHandle generic_;
  HandleKind kind_;
  bool released_ = false;
};

/// That the address is plain device memory of this device, in this process.
Status check_pointer(const CudaContext& context, CUdeviceptr address) {
  const CudaDriver& driver = context.driver();
  unsigned type = 0;
  const CUresult known = driver.pointer_attribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
  if (known == CUDA_ERROR_INVALID_VALUE) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "cuda:{}: {:#x} is no address that CUDA knows in this process; register "
                         "device memory that this process allocated",
                         context.ordinal(), address);
  }
  KVFERRY_DRIVER_TRY(driver, known);
  unsigned managed = 0;
  KVFERRY_DRIVER_TRY(driver,
                     driver.pointer_attribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, address));
  if (type != CU_MEMORYTYPE_DEVICE || managed != 0) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "cuda:{}: {:#x} is {} memory, which cannot be shared; allocate it with "
                         "cudaMalloc",
                         context.ordinal(), address, managed != 0 ? "managed" : "host");
  }
  int ordinal = -1;
  KVFERRY_DRIVER_TRY(
      driver, driver.pointer_attribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address));
  if (ordinal != context.ordinal()) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "{:#x} lies on cuda:{}, this rank uses cuda:{}; allocate it there",
                         address, ordinal, context.ordinal());
  }
  return ok();
}

/// The generic handle of cuMemCreate memory, with a reference of ours, if it may be exported.
Result<CUmemGenericAllocationHandle> retain_exportable(const CudaContext& context,
                                                       CUdeviceptr base) {
  const CudaDriver& driver = context.driver();
  CUmemGenericAllocationHandle generic = 0;
  if (const CUresult error = driver.mem_retain_handle(&generic, DevicePtr{base}.raw());
      error != CUDA_SUCCESS) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "cuda:{}: memory at {:#x} is neither of cudaMalloc nor of cuMemCreate "
                         "(cudaMallocAsync, or another process's?) and cannot be shared; allocate "
                         "it with cudaMalloc",
                         context.ordinal(), base);
  }
  CUmemAllocationProp properties{};
  const CUresult known = driver.mem_properties(&properties, generic);
  const bool exportable =
      known == CUDA_SUCCESS && (static_cast<unsigned>(properties.requestedHandleTypes) &
                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  if (exportable) return generic;
  driver.mem_release(generic);
  KVFERRY_DRIVER_TRY(driver, known);
  return KVFERRY_ERROR(kInvalidArgument,
                       "cuda:{}: memory at {:#x} was created with handle types {:#x}, without "
                       "POSIX descriptors; create it with "
                       "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (PyTorch: turn "
                       "expandable_segments off)",
                       context.ordinal(), base,
                       static_cast<unsigned>(properties.requestedHandleTypes));
}

}  // namespace

Result<std::unique_ptr<BorrowedMemory>> borrow_cuda_memory(ContextPtr context, DevicePtr address) {
  const DeviceGuard guard(*context);
  const CudaDriver& driver = context->driver();
  KVFERRY_TRY(check_pointer(*context, address.address));
  CUdeviceptr base = 0;
  std::size_t size_bytes = 0;
  KVFERRY_DRIVER_TRY(driver, driver.mem_address_range(&base, &size_bytes, address.address));
  KVFERRY_ASSIGN(const auto id, buffer_id(*context, base));
  if (!id) {
    return KVFERRY_ERROR(kInvalidArgument, "cuda:{}: {:#x} was freed", context->ordinal(),
                         address.address);
  }
  // The driver writes a whole int, whatever its documentation's bool.
  int legacy = 0;
  KVFERRY_DRIVER_TRY(driver, driver.pointer_attribute(
                                 &legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, base));
  CUmemGenericAllocationHandle generic = 0;
  if (legacy == 0) {
    KVFERRY_ASSIGN(generic, retain_exportable(*context, base));
  }
  return std::unique_ptr<BorrowedMemory>(
      std::make_unique<CudaBorrowed>(std::move(context), base, size_bytes, *id, generic));
}

}  // namespace kvferry::ipc
