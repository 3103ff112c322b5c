// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <string_view>

namespace kvferry::ipc {

/// While it lives, this thread's calls have nothing to do with what other threads record: a
/// recording in the mode that is the default (PyTorch's) forbids those that may block to every
/// thread, and breaks off when one of them makes one.
class UncapturedCalls {
 public:
  UncapturedCalls() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  UncapturedCalls(const UncapturedCalls&) = delete;
  UncapturedCalls& operator=(const UncapturedCalls&) = delete;
  ~UncapturedCalls() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  ///< Then: what it was.
};

/// The driver calls that the runtime API has no equivalent for, looked up through the runtime, so
/// that nothing links libcuda and the same binary starts on machines without a driver.
struct CudaDriver {
  decltype(&cuGetErrorString) get_error_string = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) primary_ctx_retain = nullptr;
  decltype(&cuDevicePrimaryCtxRelease) primary_ctx_release = nullptr;
  decltype(&cuCtxPushCurrent) ctx_push = nullptr;
  decltype(&cuCtxPopCurrent) ctx_pop = nullptr;
  decltype(&cuMemGetAllocationGranularity) mem_granularity = nullptr;
  decltype(&cuMemAddressReserve) mem_address_reserve = nullptr;
  decltype(&cuMemAddressFree) mem_address_free = nullptr;
  decltype(&cuMemCreate) mem_create = nullptr;
  decltype(&cuMemRelease) mem_release = nullptr;
  decltype(&cuMemMap) mem_map = nullptr;
  decltype(&cuMemUnmap) mem_unmap = nullptr;
  decltype(&cuMemSetAccess) mem_set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) mem_export = nullptr;
  decltype(&cuMemImportFromShareableHandle) mem_import = nullptr;
  decltype(&cuMemGetAddressRange) mem_address_range = nullptr;
  decltype(&cuMemRetainAllocationHandle) mem_retain_handle = nullptr;
  decltype(&cuMemGetAllocationPropertiesFromHandle) mem_properties = nullptr;
  decltype(&cuPointerGetAttribute) pointer_attribute = nullptr;
  decltype(&cuStreamWaitValue32) stream_wait_value = nullptr;
  decltype(&cuStreamWriteValue32) stream_write_value = nullptr;

  /// Throws Exception when a call is missing (driver too old).
  [[nodiscard]] static CudaDriver load();
};

/// Errors of either API; the runtime's last error is cleared. Out of memory has a code of its own.
[[nodiscard]] Error cuda_error(cudaError_t error,
                               std::string_view what,
                               const char* file,
                               int line);
[[nodiscard]] Error driver_error(
    const CudaDriver& driver, CUresult error, std::string_view what, const char* file, int line);

/// One device's primary context, retained for as long as anything of the device lives. Shared by
/// the device and all it made, so that a stream destroyed late still has its context.
class CudaContext {
 public:
  explicit CudaContext(int ordinal);  ///< Throws Exception.
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;
  ~CudaContext();

  [[nodiscard]] const CudaDriver& driver() const noexcept { return driver_; }
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
  [[nodiscard]] CUcontext raw() const noexcept { return context_; }

 private:
  CudaDriver driver_;
  int ordinal_;
  CUcontext context_ = nullptr;
};

using ContextPtr = std::shared_ptr<const CudaContext>;

/// Makes the device current in this thread for a scope and puts back what was. Pushes a context
/// instead of setting the device: setting one would create a context on whichever device was
/// "current" before, half a GiB each.
class DeviceGuard {
 public:
  explicit DeviceGuard(const CudaContext& context) noexcept;
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  const CudaContext& context_;
  bool pushed_ = false;
};

}  // namespace kvferry::ipc

/// In functions that return Result or Status: returns an Error when the runtime call fails.
#define KVFERRY_CUDA_TRY(expr)                                                    \
  do {                                                                            \
    if (const cudaError_t kvferry_cuda = (expr); kvferry_cuda != cudaSuccess) {   \
      return ::kvferry::ipc::cuda_error(kvferry_cuda, #expr, __FILE__, __LINE__); \
    }                                                                             \
  } while (false)

/// The same for a driver call.
#define KVFERRY_DRIVER_TRY(driver, expr)                                                      \
  do {                                                                                        \
    if (const CUresult kvferry_driver = (expr); kvferry_driver != CUDA_SUCCESS) {             \
      return ::kvferry::ipc::driver_error(driver, kvferry_driver, #expr, __FILE__, __LINE__); \
    }                                                                                         \
  } while (false)
