// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_device.hpp"

#include "device/cuda_broadcast.hpp"
#include "device/cuda_context.hpp"
#include "device/cuda_identity.hpp"
#include "device/cuda_matrix_product.hpp"
#include "device/cuda_memory.hpp"
#include "device/cuda_stream.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/kernels/block_copy.hpp"
#include "kvferry/kernels/reference_model_launch.hpp"
#include "os/numa_nodes.hpp"

#include <mutex>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::uint64_t kMaxRegisterBytes = 1ULL << 30;

// Regions travel as kernel parameters: the table is plain host memory.
class CudaRegionTable final : public RegionTable {
 public:
  explicit CudaRegionTable(std::vector<kernels::StridedRegion> regions)
      : regions_(std::move(regions)) {}
  [[nodiscard]] std::span<const kernels::StridedRegion> regions() const noexcept override {
    return regions_;
  }

 private:
  std::vector<kernels::StridedRegion> regions_;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(DeviceSpec spec, std::shared_ptr<const CudaContext> context, std::string name)
      : spec_(std::move(spec)), context_(std::move(context)), name_(std::move(name)) {
    auto granularity = cuda_granularity(*context_);
    if (!granularity) throw Exception(std::move(granularity).error());
    granularity_ = *granularity;
  }

  [[nodiscard]] const DeviceSpec& spec() const noexcept override { return spec_; }
  [[nodiscard]] std::string name() const override { return name_; }

  [[nodiscard]] Result<DeviceIdentity> identity() const override {
    return cuda_identity(context_->ordinal());
  }
  [[nodiscard]] std::vector<int> numa_nodes() const override {
    const auto bus_id = cuda_bus_id(context_->ordinal());
    return bus_id ? near_numa_nodes(*bus_id) : std::vector<int>{};
  }

  [[nodiscard]] Result<MemoryInfo> memory_info() override {
    const DeviceGuard guard(*context_);
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    KVFERRY_CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes));
    return MemoryInfo{free_bytes, total_bytes};
  }

  [[nodiscard]] Result<std::unique_ptr<AddressRange>> reserve(std::uint64_t size_bytes) override {
    KVFERRY_TRY(check_size(size_bytes));
    return reserve_cuda_range(context_, align_up(size_bytes, granularity_));
  }

  [[nodiscard]] Result<std::unique_ptr<DeviceMemory>> allocate(std::uint64_t size_bytes,
                                                               HandleKind kind,
                                                               AddressRange* at) override {
    KVFERRY_TRY(check_size(size_bytes));
    if (at != nullptr && kind != HandleKind::kVmm) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "legacy memory cannot be placed at an address; use --handles vmm");
    }
    return allocate_cuda_memory(context_, align_up(size_bytes, granularity_), kind, at);
  }

  [[nodiscard]] Result<std::unique_ptr<DeviceMemory>> import(ExportedHandle handle,
                                                             AddressRange* at) override {
    KVFERRY_TRY(check_size(handle.size_bytes));
    return import_cuda_memory(context_, std::move(handle), at);
  }

  [[nodiscard]] std::uint64_t allocation_granularity() const noexcept override {
    return granularity_;
  }

  [[nodiscard]] Result<std::unique_ptr<BorrowedMemory>> borrow(DevicePtr address) override {
    return borrow_cuda_memory(context_, address);
  }

  [[nodiscard]] Result<std::unique_ptr<Stream>> make_stream(StreamPriority priority) override {
    return make_cuda_stream(context_, priority);
  }
  [[nodiscard]] Result<std::unique_ptr<RegionTable>> make_region_table(
      std::vector<kernels::StridedRegion> regions) override {
    // Whoever has no table launches no kernel.
    KVFERRY_TRY(load_kernels());
    return std::unique_ptr<RegionTable>(std::make_unique<CudaRegionTable>(std::move(regions)));
  }
  [[nodiscard]] Result<std::unique_ptr<PinnedBuffer>> make_pinned_buffer(
      std::uint64_t size_bytes) override {
    KVFERRY_TRY(check_size(size_bytes));
    return make_cuda_pinned_buffer(context_, size_bytes);
  }

  [[nodiscard]] Status register_host(void* data, std::uint64_t size_bytes) override {
    if (data == nullptr || size_bytes == 0 || size_bytes > kMaxRegisterBytes) {
      return KVFERRY_ERROR(kInvalidArgument,
                           "host range of {} bytes cannot be registered; pieces of 1 byte to 1 GiB",
                           size_bytes);
    }
    const DeviceGuard guard(*context_);
    const UncapturedCalls uncaptured;
    // wait-driver: pinning of at most 1 GiB; about 0.1 s
    KVFERRY_CUDA_TRY(
        cudaHostRegister(data, size_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
    return ok();
  }
  [[nodiscard]] Status unregister_host(void* data) override {
    const DeviceGuard guard(*context_);
    const UncapturedCalls uncaptured;
    // wait-driver: unpinning of at most 1 GiB; no copy of ours uses it any more
    KVFERRY_CUDA_TRY(cudaHostUnregister(data));
    return ok();
  }

  [[nodiscard]] Result<std::unique_ptr<MatrixProduct>> make_product(
      const MatrixShape& shape) override {
    return make_cuda_matrix_product(*this, context_, shape);
  }

  [[nodiscard]] Result<BroadcastPort> broadcast_port() override {
    return cuda_broadcast_port(*context_);
  }
  [[nodiscard]] Result<std::unique_ptr<BroadcastRoot>> open_broadcast() override {
    return open_cuda_broadcast(context_);
  }
  [[nodiscard]] Result<std::unique_ptr<BroadcastGroup>> join_broadcast(
      const BroadcastSeat& seat, const BroadcastWait& wait) override {
    return join_cuda_broadcast(context_, seat, wait);
  }

 private:
  [[nodiscard]] Status load_kernels() {
    const std::lock_guard lock(mutex_);
    if (loaded_) return ok();
    const DeviceGuard guard(*context_);
    KVFERRY_CUDA_TRY(kernels::load_block_copy());
    KVFERRY_CUDA_TRY(kernels::load_pattern());
    KVFERRY_CUDA_TRY(kernels::load_reference_model());
    loaded_ = true;
    return ok();
  }

  static Status check_size(std::uint64_t size_bytes) {
    if (size_bytes > 0 && size_bytes < (1ULL << 48)) return ok();
    return KVFERRY_ERROR(kInvalidArgument, "{} bytes are no size for device memory", size_bytes);
  }

  DeviceSpec spec_;
  std::shared_ptr<const CudaContext> context_;
  std::string name_;
  std::uint64_t granularity_ = 0;
  std::mutex mutex_;  ///< Guards loaded_.
  bool loaded_ = false;
};

int attribute(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  if (const cudaError_t error = cudaDeviceGetAttribute(&value, which, ordinal);
      error != cudaSuccess) {
    throw Exception(cuda_error(error, "cudaDeviceGetAttribute", __FILE__, __LINE__));
  }
  return value;
}

}  // namespace

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return 0;
  }
  return count;
}

std::unique_ptr<Device> make_cuda_device(const DeviceSpec& spec) {
  const int count = cuda_device_count();
  if (spec.ordinal < 0 || spec.ordinal >= count) {
    throw Exception(KVFERRY_ERROR(
        kNotFound, "cuda:{} does not exist, {} CUDA devices are usable here{}", spec.ordinal, count,
        count == 0 ? "; use --device host, or install a driver" : ""));
  }
  // Kernels and copy engines use the pool at its host addresses.
  if (attribute(cudaDevAttrCanUseHostPointerForRegisteredMem, spec.ordinal) == 0) {
    throw Exception(KVFERRY_ERROR(kCuda,
                                  "cuda:{} gives registered host memory another address, which "
                                  "kvferry does not support",
                                  spec.ordinal));
  }
  cudaDeviceProp properties{};
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, spec.ordinal);
      error != cudaSuccess) {
    throw Exception(cuda_error(error, "cudaGetDeviceProperties", __FILE__, __LINE__));
  }
  return std::make_unique<CudaDevice>(spec, std::make_shared<CudaContext>(spec.ordinal),
                                      properties.name);
}

}  // namespace kvferry::ipc
