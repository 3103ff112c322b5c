// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_context.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::ipc {

/// What a stream enqueues in a CUDA stream, whether that runs it or is being captured.
/// @lifetime the CUDA stream outlives the object; it is not owned.
class CudaOperations : public Stream {
 public:
  [[nodiscard]] Status copy(CopyDirection direction,
                            std::span<const CopyOp> ops,
                            CopyMode mode) override;
  [[nodiscard]] Status copy_rows(CopyDirection direction, std::span<const RowCopyOp> ops) override;
  [[nodiscard]] Status zero(DevicePtr target, std::uint64_t size_bytes) override;
  [[nodiscard]] Status copy_within(DevicePtr source,
                                   DevicePtr target,
                                   std::uint64_t size_bytes) override;
  [[nodiscard]] Status gather(const RegionTable& table,
                              std::span<const std::uint32_t> ids,
                              DevicePtr packed,
                              std::uint64_t packed_stride) override;
  [[nodiscard]] Status scatter(const RegionTable& table,
                               std::span<const std::uint32_t> ids,
                               DevicePtr packed,
                               std::uint64_t packed_stride) override;
  void limit_thread_blocks(std::uint32_t most) noexcept override { thread_blocks_ = most; }
  [[nodiscard]] Status fill_pattern(const RegionTable& table,
                                    std::span<const kernels::SeededBlock> blocks) override;
  [[nodiscard]] Status verify_pattern(const RegionTable& table,
                                      std::span<const kernels::SeededBlock> blocks,
                                      PinnedBuffer& results) override;
  [[nodiscard]] Status checksum(const RegionTable& table,
                                std::span<const std::uint32_t> ids,
                                PinnedBuffer& results) override;
  [[nodiscard]] Status decode(const RegionTable& table, const kernels::DecodePass& pass) override;
  [[nodiscard]] Status fold(DevicePtr source,
                            std::uint64_t size_bytes,
                            std::uint64_t seed,
                            DevicePtr sums) override;
  [[nodiscard]] Status expand(DevicePtr source,
                              std::uint64_t source_bytes,
                              DevicePtr target,
                              std::uint64_t target_bytes) override;
  [[nodiscard]] Status wait_word(const StreamWord& word, std::uint32_t at_least) override;
  [[nodiscard]] Status write_word(const StreamWord& word, std::uint32_t value) override;

  /// For what other libraries enqueue.
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

 protected:
  CudaOperations(ContextPtr context, cudaStream_t stream)
      : context_(std::move(context)), stream_(stream) {}

  [[nodiscard]] const ContextPtr& context() const noexcept { return context_; }
  [[nodiscard]] std::string device_name() const;

 private:
  using BlockCopyLauncher = cudaError_t (*)(const kernels::PackedBlocks&,
                                            const kernels::BlockIds&,
                                            std::uint32_t,
                                            cudaStream_t);

  Status block_copy(const RegionTable& table,
                    std::span<const std::uint32_t> ids,
                    DevicePtr packed,
                    std::uint64_t packed_stride,
                    BlockCopyLauncher launcher);
  Status enqueue_rows(CopyDirection direction, const RowCopyOp& op);
  Status enqueue_slices(CopyDirection direction, const RowCopyOp& op);
  Status copy_batch(CopyDirection direction, std::span<const CopyOp> ops);

  ContextPtr context_;
  cudaStream_t stream_;
  std::uint32_t thread_blocks_ = kCopyThreadBlocks;
  // Kept between calls, so that warm batches allocate nothing.
  std::vector<void*> targets_;
  std::vector<const void*> sources_;
  std::vector<std::size_t> sizes_;
};

}  // namespace kvferry::ipc
