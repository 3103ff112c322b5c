// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_context.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <memory>

namespace kvferry::ipc {

/// Memory of one CUDA device, both kinds, owned and imported. Every function runs under a guard.
[[nodiscard]] Result<std::unique_ptr<AddressRange>> reserve_cuda_range(
    std::shared_ptr<const CudaContext> context, std::uint64_t size_bytes);

[[nodiscard]] Result<std::unique_ptr<DeviceMemory>> allocate_cuda_memory(
    std::shared_ptr<const CudaContext> context,
    std::uint64_t size_bytes,
    HandleKind kind,
    AddressRange* at);

[[nodiscard]] Result<std::unique_ptr<DeviceMemory>> import_cuda_memory(
    std::shared_ptr<const CudaContext> context, ExportedHandle handle, AddressRange* at);

/// The CUDA device's Device::borrow().
[[nodiscard]] Result<std::unique_ptr<BorrowedMemory>> borrow_cuda_memory(
    std::shared_ptr<const CudaContext> context, DevicePtr address);

/// The handle of a cudaMalloc allocation at its base. Under a guard of the caller.
[[nodiscard]] Result<ExportedHandle> export_legacy(DevicePtr base, std::uint64_t size_bytes);
/// The same for memory behind a generic handle: a POSIX descriptor.
[[nodiscard]] Result<ExportedHandle> export_vmm(const CudaContext& context,
                                                CUmemGenericAllocationHandle generic,
                                                std::uint64_t size_bytes);

/// What sizes are rounded up to: the driver's granularity for shareable memory.
[[nodiscard]] Result<std::uint64_t> cuda_granularity(const CudaContext& context);

}  // namespace kvferry::ipc
