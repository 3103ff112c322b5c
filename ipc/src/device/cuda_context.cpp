// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_context.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <array>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr unsigned kDriverApiVersion = 12'000;

template <typename Function> void look_up(const char* name, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult state = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, kDriverApiVersion, cudaEnableDefault, &state);
  if (error != cudaSuccess || state != cudaDriverEntryPointSuccess || found == nullptr) {
    throw Exception(KVFERRY_ERROR(kCuda,
                                  "the CUDA driver has no {} of version {}; install a driver for "
                                  "CUDA 12.8 or later",
                                  name, kDriverApiVersion));
  }
  function = reinterpret_cast<Function>(found);
}

}  // namespace

CudaDriver CudaDriver::load() {
  CudaDriver driver;
  look_up("cuGetErrorString", driver.get_error_string);
  look_up("cuDevicePrimaryCtxRetain", driver.primary_ctx_retain);
  look_up("cuDevicePrimaryCtxRelease", driver.primary_ctx_release);
  look_up("cuCtxPushCurrent", driver.ctx_push);
  look_up("cuCtxPopCurrent", driver.ctx_pop);
  look_up("cuMemGetAllocationGranularity", driver.mem_granularity);
  look_up("cuMemAddressReserve", driver.mem_address_reserve);
  look_up("cuMemAddressFree", driver.mem_address_free);
  look_up("cuMemCreate", driver.mem_create);
  look_up("cuMemRelease", driver.mem_release);
  look_up("cuMemMap", driver.mem_map);
  look_up("cuMemUnmap", driver.mem_unmap);
  look_up("cuMemSetAccess", driver.mem_set_access);
  look_up("cuMemExportToShareableHandle", driver.mem_export);
  look_up("cuMemImportFromShareableHandle", driver.mem_import);
  look_up("cuMemGetAddressRange", driver.mem_address_range);
  look_up("cuMemRetainAllocationHandle", driver.mem_retain_handle);
  look_up("cuMemGetAllocationPropertiesFromHandle", driver.mem_properties);
  look_up("cuPointerGetAttribute", driver.pointer_attribute);
  look_up("cuStreamWaitValue32", driver.stream_wait_value);
  look_up("cuStreamWriteValue32", driver.stream_write_value);
  return driver;
}

Error cuda_error(cudaError_t error, std::string_view what, const char* file, int line) {
  static_cast<void>(cudaGetLastError());  // else the next unrelated check would find it
  const ErrorCode code =
      error == cudaErrorMemoryAllocation ? ErrorCode::kNoDeviceMemory : ErrorCode::kCuda;
  return Error{code,
               fmt::format("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error)),
               static_cast<int>(error), file, line};
}

Error driver_error(
    const CudaDriver& driver, CUresult error, std::string_view what, const char* file, int line) {
  const char* text = nullptr;
  if (driver.get_error_string(error, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown";
  const ErrorCode code =
      error == CUDA_ERROR_OUT_OF_MEMORY ? ErrorCode::kNoDeviceMemory : ErrorCode::kCuda;
  return Error{code, fmt::format("{}: {} ({})", what, text, static_cast<int>(error)),
               static_cast<int>(error), file, line};
}

CudaContext::CudaContext(int ordinal) : driver_(CudaDriver::load()), ordinal_(ordinal) {
  const CUresult error = driver_.primary_ctx_retain(&context_, ordinal);
  if (error != CUDA_SUCCESS) {
    throw Exception(
        driver_error(driver_, error, fmt::format("open cuda:{}", ordinal), __FILE__, __LINE__));
  }
}

CudaContext::~CudaContext() { driver_.primary_ctx_release(ordinal_); }

DeviceGuard::DeviceGuard(const CudaContext& context) noexcept : context_(context) {
  const CUresult error = context.driver().ctx_push(context.raw());
  pushed_ = error == CUDA_SUCCESS;
  if (!pushed_) {
    // Calls that follow fail by themselves, with a better text.
    log_error("cuda:{}: context cannot be made current ({})", context.ordinal(),
              static_cast<int>(error));
  }
}

DeviceGuard::~DeviceGuard() {
  // A pop without the push would take away the caller's own context.
  if (!pushed_) return;
  CUcontext popped = nullptr;
  context_.driver().ctx_pop(&popped);
}

}  // namespace kvferry::ipc
