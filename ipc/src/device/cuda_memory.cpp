// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_memory.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <cstring>
#include <optional>
#include <utility>

namespace kvferry::ipc {
namespace {

CUmemAllocationProp shareable_properties(int ordinal) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = ordinal;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

class CudaAddressRange final : public AddressRange {
 public:
  CudaAddressRange(ContextPtr context, CUdeviceptr address, std::uint64_t size_bytes)
      : context_(std::move(context)), address_(address), size_bytes_(size_bytes) {}
  CudaAddressRange(const CudaAddressRange&) = delete;
  CudaAddressRange& operator=(const CudaAddressRange&) = delete;
  ~CudaAddressRange() override {
    const DeviceGuard guard(*context_);
    const CudaDriver& driver = context_->driver();
    if (const CUresult error = driver.mem_address_free(address_, size_bytes_);
        error != CUDA_SUCCESS && error != CUDA_ERROR_DEINITIALIZED) {
      log_warn("{}",
               driver_error(driver, error, "cuMemAddressFree", __FILE__, __LINE__).to_string());
    }
  }

  [[nodiscard]] DevicePtr address() const noexcept override { return DevicePtr{address_}; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override { return size_bytes_; }

 private:
  ContextPtr context_;
  CUdeviceptr address_;
  std::uint64_t size_bytes_;
};

// Common to all kinds: a destructor that releases and logs.
class CudaMemory : public DeviceMemory {
 public:
  CudaMemory(ContextPtr context, CUdeviceptr address, std::uint64_t size_bytes)
      : context_(std::move(context)), address_(address), size_bytes_(size_bytes) {}
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  [[nodiscard]] DevicePtr address() const noexcept override { return DevicePtr{address_}; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override { return size_bytes_; }

 protected:
  void release_and_log() noexcept {
    if (const Status status = release(); !status) {
      log_error("device memory of {} not released: {}", format_size(size_bytes_),
                status.error().to_string());
    }
  }

  ContextPtr context_;
  CUdeviceptr address_;
  std::uint64_t size_bytes_;
};

class LegacyMemory final : public CudaMemory {
 public:
  LegacyMemory(ContextPtr context, CUdeviceptr address, std::uint64_t size_bytes, bool imported)
      : CudaMemory(std::move(context), address, size_bytes), imported_(imported) {}
  LegacyMemory(const LegacyMemory&) = delete;
  LegacyMemory& operator=(const LegacyMemory&) = delete;
  ~LegacyMemory() override { release_and_log(); }

  [[nodiscard]] HandleKind kind() const noexcept override { return HandleKind::kLegacy; }

  [[nodiscard]] Result<ExportedHandle> export_handle() override {
    if (imported_) {
      return KVFERRY_ERROR(kInvalidArgument, "imported memory cannot be exported again");
    }
    const DeviceGuard guard(*context_);
    return export_legacy(address(), size_bytes_);
  }

  [[nodiscard]] Status release() override {
    if (address_ == 0) return ok();
    const DeviceGuard guard(*context_);
    void* pointer = address().raw();
    address_ = 0;
    if (imported_) {
      // wait-driver: unmapping; own work on it has ended
      KVFERRY_CUDA_TRY(cudaIpcCloseMemHandle(pointer));
    } else {
      // wait-driver: the free, which waits for all work of this process on the device; own work on
      // it has ended
      KVFERRY_CUDA_TRY(cudaFree(pointer));
    }
    return ok();
  }

 private:
  bool imported_;
};

class VmmMemory final : public CudaMemory {
 public:
  /// own_range: the reservation is ours to free; else it belongs to an AddressRange of the caller.
  VmmMemory(ContextPtr context,
            CUdeviceptr address,
            std::uint64_t size_bytes,
            CUmemGenericAllocationHandle handle,
            std::unique_ptr<AddressRange> own_range,
            bool imported)
      : CudaMemory(std::move(context), address, size_bytes),
        handle_(handle),
        own_range_(std::move(own_range)),
        imported_(imported) {}
  VmmMemory(const VmmMemory&) = delete;
  VmmMemory& operator=(const VmmMemory&) = delete;
  ~VmmMemory() override { release_and_log(); }

  [[nodiscard]] HandleKind kind() const noexcept override { return HandleKind::kVmm; }

  [[nodiscard]] Result<ExportedHandle> export_handle() override {
    if (imported_) {
      return KVFERRY_ERROR(kInvalidArgument, "imported memory cannot be exported again");
    }
    const DeviceGuard guard(*context_);
    return export_vmm(*context_, handle_, size_bytes_);
  }

  // Both steps are always tried: a failed unmap must not keep the reference, too.
  [[nodiscard]] Status release() override {
    if (address_ == 0) return ok();
    const DeviceGuard guard(*context_);
    const CudaDriver& driver = context_->driver();
    // wait-driver: unmapping; own work on it has ended
    const CUresult unmapped = driver.mem_unmap(address_, size_bytes_);
    const CUresult released = driver.mem_release(handle_);
    address_ = 0;
    own_range_.reset();
    KVFERRY_DRIVER_TRY(driver, unmapped);
    KVFERRY_DRIVER_TRY(driver, released);
    return ok();
  }

 private:
  CUmemGenericAllocationHandle handle_;
  std::unique_ptr<AddressRange> own_range_;
  bool imported_;
};

// Maps a handle, which this function owns from now on: it is released on every error path.
Result<std::unique_ptr<DeviceMemory>> map_handle(ContextPtr context,
                                                 CUmemGenericAllocationHandle handle,
                                                 std::uint64_t size_bytes,
                                                 AddressRange* at,
                                                 bool imported) {
  const CudaDriver& driver = context->driver();
  const auto drop = [&](Error error) {
    driver.mem_release(handle);
    return error;
  };
  std::unique_ptr<AddressRange> own_range;
  if (at == nullptr) {
    auto reserved = reserve_cuda_range(context, size_bytes);
    if (!reserved) return drop(std::move(reserved).error());
    own_range = std::move(reserved).value();
    at = own_range.get();
  }
  if (at->size_bytes() < size_bytes) {
    return drop(KVFERRY_ERROR(kInvalidArgument,
                              "the address range holds {} bytes, the memory has {}",
                              at->size_bytes(), size_bytes));
  }
  const CUdeviceptr address = at->address().address;
  if (const CUresult error = driver.mem_map(address, size_bytes, 0, handle, 0);
      error != CUDA_SUCCESS) {
    return drop(driver_error(driver, error, "cuMemMap", __FILE__, __LINE__));
  }
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = context->ordinal();
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  if (const CUresult error = driver.mem_set_access(address, size_bytes, &access, 1);
      error != CUDA_SUCCESS) {
    // wait-driver: unmapping; nothing has used it
    driver.mem_unmap(address, size_bytes);
    return drop(driver_error(driver, error, "cuMemSetAccess", __FILE__, __LINE__));
  }
  return std::unique_ptr<DeviceMemory>(std::make_unique<VmmMemory>(
      std::move(context), address, size_bytes, handle, std::move(own_range), imported));
}

Error with_sizes(Error error, const CudaContext& context, std::uint64_t size_bytes) {
  if (error.code != ErrorCode::kNoDeviceMemory) return error;
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) return error;
  error.message = fmt::format("cuda:{} has {} of {} free, {} were asked for: {}", context.ordinal(),
                              format_size(free_bytes), format_size(total_bytes),
                              format_size(size_bytes), error.message);
  return error;
}

}  // namespace

Result<ExportedHandle> export_legacy(DevicePtr base, std::uint64_t size_bytes) {
  cudaIpcMemHandle_t raw{};
  KVFERRY_CUDA_TRY(cudaIpcGetMemHandle(&raw, base.raw()));
  ExportedHandle handle;
  handle.kind = HandleKind::kLegacy;
  handle.size_bytes = size_bytes;
  handle.token.resize(sizeof(raw));
  std::memcpy(handle.token.data(), &raw, sizeof(raw));
  return handle;
}

Result<ExportedHandle> export_vmm(const CudaContext& context,
                                  CUmemGenericAllocationHandle generic,
                                  std::uint64_t size_bytes) {
  int fd = -1;
  KVFERRY_DRIVER_TRY(
      context.driver(),
      context.driver().mem_export(&fd, generic, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  ExportedHandle handle;
  handle.kind = HandleKind::kVmm;
  handle.size_bytes = size_bytes;
  handle.fd = UniqueFd(fd);
  return handle;
}

Result<std::uint64_t> cuda_granularity(const CudaContext& context) {
  const DeviceGuard guard(context);
  const CUmemAllocationProp properties = shareable_properties(context.ordinal());
  std::size_t granularity = 0;
  KVFERRY_DRIVER_TRY(context.driver(),
                     context.driver().mem_granularity(&granularity, &properties,
                                                      CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  return std::uint64_t{granularity};
}

Result<std::unique_ptr<AddressRange>> reserve_cuda_range(ContextPtr context,
                                                         std::uint64_t size_bytes) {
  const DeviceGuard guard(*context);
  CUdeviceptr address = 0;
  KVFERRY_DRIVER_TRY(context->driver(),
                     context->driver().mem_address_reserve(&address, size_bytes, 0, 0, 0));
  return std::unique_ptr<AddressRange>(
      std::make_unique<CudaAddressRange>(std::move(context), address, size_bytes));
}

Result<std::unique_ptr<DeviceMemory>> allocate_cuda_memory(ContextPtr context,
                                                           std::uint64_t size_bytes,
                                                           HandleKind kind,
                                                           AddressRange* at) {
  const DeviceGuard guard(*context);
  if (kind == HandleKind::kLegacy) {
    void* pointer = nullptr;
    if (const cudaError_t error = cudaMalloc(&pointer, size_bytes); error != cudaSuccess) {
      return with_sizes(cuda_error(error, "cudaMalloc", __FILE__, __LINE__), *context, size_bytes);
    }
    return std::unique_ptr<DeviceMemory>(std::make_unique<LegacyMemory>(
        std::move(context), reinterpret_cast<CUdeviceptr>(pointer), size_bytes, false));
  }
  const CUmemAllocationProp properties = shareable_properties(context->ordinal());
  CUmemGenericAllocationHandle handle = 0;
  const CudaDriver& driver = context->driver();
  if (const CUresult error = driver.mem_create(&handle, size_bytes, &properties, 0);
      error != CUDA_SUCCESS) {
    return with_sizes(driver_error(driver, error, "cuMemCreate", __FILE__, __LINE__), *context,
                      size_bytes);
  }
  return map_handle(std::move(context), handle, size_bytes, at, false);
}

namespace {

/// A size is the peer's word; how much is mapped is the driver's.
Status check_legacy_size(const CudaContext& context, DevicePtr address, std::uint64_t said_bytes) {
  CUdeviceptr base = 0;
  std::size_t mapped_bytes = 0;
  KVFERRY_DRIVER_TRY(context.driver(),
                     context.driver().mem_address_range(&base, &mapped_bytes, address.address));
  const std::uint64_t room_bytes = mapped_bytes - (address.address - base);
  if (said_bytes <= room_bytes) return ok();
  return KVFERRY_ERROR(kProtocol, "CUDA IPC handle said to be of {} bytes has {}", said_bytes,
                       room_bytes);
}

}  // namespace

Result<std::unique_ptr<DeviceMemory>> import_cuda_memory(ContextPtr context,
                                                         ExportedHandle handle,
                                                         AddressRange* at) {
  const DeviceGuard guard(*context);
  if (handle.kind == HandleKind::kLegacy) {
    cudaIpcMemHandle_t raw{};
    if (handle.token.size() != sizeof(raw)) {
      return KVFERRY_ERROR(kProtocol, "CUDA IPC token has {} bytes, expected {}",
                           handle.token.size(), sizeof(raw));
    }
    std::memcpy(&raw, handle.token.data(), sizeof(raw));
    void* pointer = nullptr;
    KVFERRY_CUDA_TRY(cudaIpcOpenMemHandle(&pointer, raw, cudaIpcMemLazyEnablePeerAccess));
    // Closes it again when the size is not what the peer says.
    auto memory = std::make_unique<LegacyMemory>(context, reinterpret_cast<CUdeviceptr>(pointer),
                                                 handle.size_bytes, true);
    KVFERRY_TRY(check_legacy_size(*context, memory->address(), handle.size_bytes));
    return std::unique_ptr<DeviceMemory>(std::move(memory));
  }
  if (!handle.fd.valid()) {
    return KVFERRY_ERROR(kProtocol, "VMM handle of {} bytes came without a descriptor",
                         handle.size_bytes);
  }
  CUmemGenericAllocationHandle imported = 0;
  void* shareable = reinterpret_cast<void*>(static_cast<std::intptr_t>(handle.fd.get()));
  KVFERRY_DRIVER_TRY(
      context->driver(),
      context->driver().mem_import(&imported, shareable, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  return map_handle(std::move(context), imported, handle.size_bytes, at, true);
}

}  // namespace kvferry::ipc
