// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_operations.hpp"

#include "device/stream_arguments.hpp"
#include "kvferry/kernels/block_copy.hpp"
#include "kvferry/kernels/reference_model_launch.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kMaxBatchOps = 8192;

// cudaDevAttrMaxPitch of every device: rows of a 2D copy lie no further apart.
constexpr std::uint64_t kMaxPitch = 0x7FFF'FFFF;

/// A distance between rows as a number of lines of a pitch that the driver takes.
struct SlicePitch {
  std::uint64_t pitch = 0;
  std::uint64_t lines = 0;  ///< 0: there is none.
};

SlicePitch slice_pitch(std::uint64_t distance, std::uint64_t row_bytes) {
  constexpr std::uint64_t kMostLines = 4096;
  const std::uint64_t fewest = (distance + kMaxPitch - 1) / kMaxPitch;
  for (std::uint64_t lines = fewest; lines < fewest + kMostLines; ++lines) {
    if (distance / lines < row_bytes) break;
    if (distance % lines == 0) return {distance / lines, lines};
  }
  return {};
}

std::uint64_t* result_words(PinnedBuffer& buffer, std::size_t index) {
  return reinterpret_cast<std::uint64_t*>(buffer.data()) + index;
}

kernels::SeededBlocks seeded(std::span<const kernels::SeededBlock> blocks, std::size_t first) {
  kernels::SeededBlocks batch;
  batch.count = static_cast<std::uint32_t>(
      std::min<std::size_t>(kernels::kMaxSeededPerLaunch, blocks.size() - first));
  std::copy_n(blocks.begin() + static_cast<std::ptrdiff_t>(first), batch.count, batch.blocks);
  return batch;
}

kernels::BlockIds block_ids(std::span<const std::uint32_t> ids, std::size_t first) {
  kernels::BlockIds batch;
  batch.count = static_cast<std::uint32_t>(
      std::min<std::size_t>(kernels::kMaxBlocksPerLaunch, ids.size() - first));
  std::copy_n(ids.begin() + static_cast<std::ptrdiff_t>(first), batch.count, batch.ids);
  return batch;
}

Status check_results(PinnedBuffer& results, std::size_t count) {
  if (results.size_bytes() >= count * sizeof(std::uint64_t)) return ok();
  return KVFERRY_ERROR(kInvalidArgument, "result buffer holds {} bytes, {} words are needed",
                       results.size_bytes(), count);
}

}  // namespace

std::string CudaOperations::device_name() const {
  return fmt::format("cuda:{}", context_->ordinal());
}

Status CudaOperations::copy(CopyDirection direction, std::span<const CopyOp> ops, CopyMode mode) {
  const DeviceGuard guard(*context_);
  if (mode == CopyMode::kBatch && ops.size() > 1) return copy_batch(direction, ops);
  for (const CopyOp& op : ops) {
    if (op.size_bytes == 0) continue;  // a graph cannot hold it
    const bool to_host = direction == CopyDirection::kDeviceToHost;
    KVFERRY_CUDA_TRY(cudaMemcpyAsync(
        to_host ? op.host : op.device.raw(), to_host ? op.device.raw() : op.host, op.size_bytes,
        to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream_));
  }
  return ok();
}

Status CudaOperations::copy_rows(CopyDirection direction, std::span<const RowCopyOp> ops) {
  KVFERRY_TRY(check_rows(device_name(), direction, ops));
  const DeviceGuard guard(*context_);
  for (const RowCopyOp& op : ops) {
    if (op.row_bytes == 0 || op.rows == 0) continue;
    KVFERRY_TRY(enqueue_rows(direction, op));
  }
  return ok();
}

Status CudaOperations::enqueue_rows(CopyDirection direction, const RowCopyOp& op) {
  const bool to_host = direction == CopyDirection::kDeviceToHost;
  if (op.rows == 1) {  // whatever its pitches are
    const CopyOp row{op.host, op.device, op.row_bytes};
    return copy(direction, {&row, 1}, CopyMode::kEach);
  }
  if (op.host_pitch > kMaxPitch || op.device_pitch > kMaxPitch) {
    return enqueue_slices(direction, op);
  }
  KVFERRY_CUDA_TRY(cudaMemcpy2DAsync(
      to_host ? op.host : op.device.raw(), to_host ? op.host_pitch : op.device_pitch,
      to_host ? op.device.raw() : op.host, to_host ? op.device_pitch : op.host_pitch, op.row_bytes,
      op.rows, to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream_));
  return ok();
}

// Regions of a large arena may lie further apart than a pitch may be: then each row is a slice of a
// 3D copy, and slices are several lines apart.
Status CudaOperations::enqueue_slices(CopyDirection direction, const RowCopyOp& op) {
  const SlicePitch host = slice_pitch(op.host_pitch, op.row_bytes);
  const SlicePitch device = slice_pitch(op.device_pitch, op.row_bytes);
  if (host.lines == 0 || device.lines == 0) {
    for (std::uint64_t row = 0; row < op.rows; ++row) {
      const CopyOp one{static_cast<std::byte*>(op.host) + row * op.host_pitch,
                       op.device + row * op.device_pitch, op.row_bytes};
      KVFERRY_TRY(copy(direction, {&one, 1}, CopyMode::kEach));
    }
    return ok();
  }
  const cudaPitchedPtr on_host{op.host, host.pitch, op.row_bytes, host.lines};
  const cudaPitchedPtr on_device{op.device.raw(), device.pitch, op.row_bytes, device.lines};
  const bool to_host = direction == CopyDirection::kDeviceToHost;
  cudaMemcpy3DParms slices{};
  slices.srcPtr = to_host ? on_device : on_host;
  slices.dstPtr = to_host ? on_host : on_device;
  slices.extent = cudaExtent{op.row_bytes, 1, op.rows};
  slices.kind = to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  KVFERRY_CUDA_TRY(cudaMemcpy3DAsync(&slices, stream_));
  return ok();
}

Status CudaOperations::zero(DevicePtr target, std::uint64_t size_bytes) {
  if (size_bytes == 0) return ok();
  const DeviceGuard guard(*context_);
  KVFERRY_CUDA_TRY(cudaMemsetAsync(target.raw(), 0, size_bytes, stream_));
  return ok();
}

Status CudaOperations::copy_within(DevicePtr source, DevicePtr target, std::uint64_t size_bytes) {
  KVFERRY_TRY(check_copy(device_name(), source, target, size_bytes));
  if (size_bytes == 0) return ok();
  const DeviceGuard guard(*context_);
  KVFERRY_CUDA_TRY(
      cudaMemcpyAsync(target.raw(), source.raw(), size_bytes, cudaMemcpyDeviceToDevice, stream_));
  return ok();
}

Status CudaOperations::gather(const RegionTable& table,
                              std::span<const std::uint32_t> ids,
                              DevicePtr packed,
                              std::uint64_t packed_stride) {
  return block_copy(table, ids, packed, packed_stride, kernels::launch_gather);
}
Status CudaOperations::scatter(const RegionTable& table,
                               std::span<const std::uint32_t> ids,
                               DevicePtr packed,
                               std::uint64_t packed_stride) {
  return block_copy(table, ids, packed, packed_stride, kernels::launch_scatter);
}

Status CudaOperations::fill_pattern(const RegionTable& table,
                                    std::span<const kernels::SeededBlock> blocks) {
  const DeviceGuard guard(*context_);
  for (std::size_t first = 0; first < blocks.size(); first += kernels::kMaxSeededPerLaunch) {
    KVFERRY_CUDA_TRY(kernels::launch_fill_pattern(
        table.regions().data(), static_cast<std::uint32_t>(table.regions().size()),
        seeded(blocks, first), stream_));
  }
  return ok();
}

Status CudaOperations::verify_pattern(const RegionTable& table,
                                      std::span<const kernels::SeededBlock> blocks,
                                      PinnedBuffer& results) {
  KVFERRY_TRY(check_results(results, blocks.size()));
  const DeviceGuard guard(*context_);
  for (std::size_t first = 0; first < blocks.size(); first += kernels::kMaxSeededPerLaunch) {
    KVFERRY_CUDA_TRY(kernels::launch_verify_pattern(
        table.regions().data(), static_cast<std::uint32_t>(table.regions().size()),
        seeded(blocks, first), result_words(results, first), stream_));
  }
  return ok();
}

Status CudaOperations::checksum(const RegionTable& table,
                                std::span<const std::uint32_t> ids,
                                PinnedBuffer& results) {
  KVFERRY_TRY(check_results(results, ids.size()));
  const DeviceGuard guard(*context_);
  for (std::size_t first = 0; first < ids.size(); first += kernels::kMaxBlocksPerLaunch) {
    KVFERRY_CUDA_TRY(kernels::launch_checksum(
        table.regions().data(), static_cast<std::uint32_t>(table.regions().size()),
        block_ids(ids, first), result_words(results, first), stream_));
  }
  return ok();
}

Status CudaOperations::decode(const RegionTable& table, const kernels::DecodePass& pass) {
  KVFERRY_TRY(check_decode(device_name(), pass));
  const DeviceGuard guard(*context_);
  KVFERRY_CUDA_TRY(kernels::launch_decode(
      table.regions().data(), static_cast<std::uint32_t>(table.regions().size()), pass, stream_));
  return ok();
}

Status CudaOperations::fold(DevicePtr source,
                            std::uint64_t size_bytes,
                            std::uint64_t seed,
                            DevicePtr sums) {
  KVFERRY_TRY(check_fold(device_name(), source, size_bytes, sums));
  const DeviceGuard guard(*context_);
  KVFERRY_CUDA_TRY(kernels::launch_fold(static_cast<const unsigned char*>(source.raw()), size_bytes,
                                        seed, static_cast<std::uint64_t*>(sums.raw()), stream_));
  return ok();
}

Status CudaOperations::expand(DevicePtr source,
                              std::uint64_t source_bytes,
                              DevicePtr target,
                              std::uint64_t target_bytes) {
  KVFERRY_TRY(check_expand(device_name(), source, source_bytes, target, target_bytes));
  const DeviceGuard guard(*context_);
  KVFERRY_CUDA_TRY(kernels::launch_expand(static_cast<const unsigned char*>(source.raw()),
                                          source_bytes, static_cast<unsigned char*>(target.raw()),
                                          target_bytes, stream_));
  return ok();
}

Status CudaOperations::block_copy(const RegionTable& table,
                                  std::span<const std::uint32_t> ids,
                                  DevicePtr packed,
                                  std::uint64_t packed_stride,
                                  BlockCopyLauncher launcher) {
  const DeviceGuard guard(*context_);
  kernels::PackedBlocks layout;
  layout.regions = table.regions().data();
  layout.region_count = static_cast<std::uint32_t>(table.regions().size());
  layout.packed_stride = packed_stride;
  for (std::size_t first = 0; first < ids.size(); first += kernels::kMaxBlocksPerLaunch) {
    layout.packed = static_cast<unsigned char*>((packed + first * packed_stride).raw());
    KVFERRY_CUDA_TRY(launcher(layout, block_ids(ids, first), thread_blocks_, stream_));
  }
  return ok();
}

Status CudaOperations::wait_word(const StreamWord& word, std::uint32_t at_least) {
  KVFERRY_TRY(check_word(device_name(), word));
  const DeviceGuard guard(*context_);
  // Pinned memory has the same address on the device.
  KVFERRY_DRIVER_TRY(context_->driver(), context_->driver().stream_wait_value(
                                             stream_, reinterpret_cast<CUdeviceptr>(word.address()),
                                             at_least, CU_STREAM_WAIT_VALUE_GEQ));
  return ok();
}

Status CudaOperations::write_word(const StreamWord& word, std::uint32_t value) {
  KVFERRY_TRY(check_word(device_name(), word));
  const DeviceGuard guard(*context_);
  KVFERRY_DRIVER_TRY(context_->driver(), context_->driver().stream_write_value(
                                             stream_, reinterpret_cast<CUdeviceptr>(word.address()),
                                             value, CU_STREAM_WRITE_VALUE_DEFAULT));
  return ok();
}

Status CudaOperations::copy_batch(CopyDirection direction, std::span<const CopyOp> ops) {
  cudaMemcpyAttributes attributes{};
  // STREAM in both directions: with ANY a device-to-host source may be read before the compute
  // has written it, and host blocks may still be on their way from another copy.
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t attribute_index = 0;
  for (std::size_t first = 0; first < ops.size(); first += kMaxBatchOps) {
    const std::size_t count = std::min(kMaxBatchOps, ops.size() - first);
    targets_.clear();
    sources_.clear();
    sizes_.clear();
    for (const CopyOp& op : ops.subspan(first, count)) {
      const bool to_host = direction == CopyDirection::kDeviceToHost;
      targets_.push_back(to_host ? op.host : op.device.raw());
      sources_.push_back(to_host ? op.device.raw() : op.host);
      sizes_.push_back(op.size_bytes);
    }
#if CUDART_VERSION >= 13000
    KVFERRY_CUDA_TRY(cudaMemcpyBatchAsync(targets_.data(), sources_.data(), sizes_.data(), count,
                                          &attributes, &attribute_index, 1, stream_));
#else
    std::size_t failed = 0;
    KVFERRY_CUDA_TRY(cudaMemcpyBatchAsync(targets_.data(), const_cast<void**>(sources_.data()),
                                          sizes_.data(), count, &attributes, &attribute_index, 1,
                                          &failed, stream_));
#endif
  }
  return ok();
}

}  // namespace kvferry::ipc
