// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_stream.hpp"

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/kernels/block_copy.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

using ContextPtr = std::shared_ptr<const CudaContext>;

// Gather and scatter run beside the worker's compute: enough thread blocks for the link, few enough
// to leave the compute its multiprocessors (docs/performance.md).
constexpr std::uint32_t kStagingCtas = 16;
constexpr std::size_t kMaxBatchOps = 8192;
constexpr auto kDestroyDrain = std::chrono::seconds(2);

class CudaPinnedBuffer final : public PinnedBuffer {
 public:
  CudaPinnedBuffer(ContextPtr context, void* data, std::uint64_t size_bytes)
      : context_(std::move(context)),
        data_(static_cast<std::byte*>(data)),
        size_bytes_(size_bytes) {}
  CudaPinnedBuffer(const CudaPinnedBuffer&) = delete;
  CudaPinnedBuffer& operator=(const CudaPinnedBuffer&) = delete;
  ~CudaPinnedBuffer() override {
    const DeviceGuard guard(*context_);
    // wait-driver: unpinning; no copy of ours uses it any more
    if (const cudaError_t error = cudaFreeHost(data_);
        error != cudaSuccess && error != cudaErrorCudartUnloading) {
      log_warn("{}", cuda_error(error, "cudaFreeHost", __FILE__, __LINE__).to_string());
    }
  }
  [[nodiscard]] std::byte* data() noexcept override { return data_; }
  [[nodiscard]] std::uint64_t size_bytes() const noexcept override { return size_bytes_; }

 private:
  ContextPtr context_;
  std::byte* data_;
  std::uint64_t size_bytes_;
};

void CUDART_CB signal_event_fd(void* event_fd) {
  // Runs on a driver thread; must not call CUDA. A full counter (2^64-2) cannot happen.
  static_cast<void>(
      ::eventfd_write(static_cast<int>(reinterpret_cast<std::intptr_t>(event_fd)), 1));
}

std::uint64_t* result_words(PinnedBuffer& buffer, std::size_t index) {
  return reinterpret_cast<std::uint64_t*>(buffer.data()) + index;
}

class CudaStream final : public Stream {
 public:
  CudaStream(ContextPtr context, cudaStream_t stream)
      : context_(std::move(context)), stream_(stream) {}
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  ~CudaStream() override {
    const DeviceGuard guard(*context_);
    drain_bounded();
    // wait-driver: nothing, the driver keeps what still runs; it is asynchronous
    if (const cudaError_t error = cudaStreamDestroy(stream_);
        error != cudaSuccess && error != cudaErrorCudartUnloading) {
      log_warn("{}", cuda_error(error, "cudaStreamDestroy", __FILE__, __LINE__).to_string());
    }
  }

  [[nodiscard]] Status copy(CopyDirection direction,
                            std::span<const CopyOp> ops,
                            CopyMode mode) override {
    const DeviceGuard guard(*context_);
    if (mode == CopyMode::kBatch && ops.size() > 1) return copy_batch(direction, ops);
    for (const CopyOp& op : ops) {
      const bool to_host = direction == CopyDirection::kDeviceToHost;
      KVFERRY_CUDA_TRY(cudaMemcpyAsync(
          to_host ? op.host : op.device.raw(), to_host ? op.device.raw() : op.host, op.size_bytes,
          to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream_));
    }
    return ok();
  }

  [[nodiscard]] Status zero(DevicePtr target, std::uint64_t size_bytes) override {
    const DeviceGuard guard(*context_);
    KVFERRY_CUDA_TRY(cudaMemsetAsync(target.raw(), 0, size_bytes, stream_));
    return ok();
  }

  [[nodiscard]] Status gather(const RegionTable& table,
                              std::span<const std::uint32_t> ids,
                              DevicePtr packed,
                              std::uint64_t packed_stride) override {
    return block_copy(table, ids, packed, packed_stride, kernels::launch_gather);
  }
  [[nodiscard]] Status scatter(const RegionTable& table,
                               std::span<const std::uint32_t> ids,
                               DevicePtr packed,
                               std::uint64_t packed_stride) override {
    return block_copy(table, ids, packed, packed_stride, kernels::launch_scatter);
  }

  [[nodiscard]] Status fill_pattern(const RegionTable& table,
                                    std::span<const kernels::SeededBlock> blocks) override {
    const DeviceGuard guard(*context_);
    for (std::size_t first = 0; first < blocks.size(); first += kernels::kMaxSeededPerLaunch) {
      KVFERRY_CUDA_TRY(kernels::launch_fill_pattern(
          table.regions().data(), static_cast<std::uint32_t>(table.regions().size()),
          seeded(blocks, first), stream_));
    }
    return ok();
  }

  [[nodiscard]] Status verify_pattern(const RegionTable& table,
                                      std::span<const kernels::SeededBlock> blocks,
                                      PinnedBuffer& results) override {
    KVFERRY_TRY(check_results(results, blocks.size()));
    const DeviceGuard guard(*context_);
    for (std::size_t first = 0; first < blocks.size(); first += kernels::kMaxSeededPerLaunch) {
      KVFERRY_CUDA_TRY(kernels::launch_verify_pattern(
          table.regions().data(), static_cast<std::uint32_t>(table.regions().size()),
          seeded(blocks, first), result_words(results, first), stream_));
    }
    return ok();
  }

  [[nodiscard]] Status checksum(const RegionTable& table,
                                std::span<const std::uint32_t> ids,
                                PinnedBuffer& results) override {
    KVFERRY_TRY(check_results(results, ids.size()));
    const DeviceGuard guard(*context_);
    for (std::size_t first = 0; first < ids.size(); first += kernels::kMaxBlocksPerLaunch) {
      KVFERRY_CUDA_TRY(kernels::launch_checksum(
          table.regions().data(), static_cast<std::uint32_t>(table.regions().size()),
          block_ids(ids, first), result_words(results, first), stream_));
    }
    return ok();
  }

  [[nodiscard]] Status notify(int event_fd) override {
    const DeviceGuard guard(*context_);
    KVFERRY_CUDA_TRY(cudaLaunchHostFunc(
        stream_, signal_event_fd, reinterpret_cast<void*>(static_cast<std::intptr_t>(event_fd))));
    return ok();
  }

  [[nodiscard]] Result<bool> query() override {
    const DeviceGuard guard(*context_);
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state == cudaErrorNotReady) {
      // Not an error, and yet kept as the last one: the next launch would report it as its own.
      static_cast<void>(cudaGetLastError());
      return false;
    }
    if (state != cudaSuccess) return cuda_error(state, "cudaStreamQuery", __FILE__, __LINE__);
    return true;
  }

 private:
  using BlockCopyLauncher = cudaError_t (*)(const kernels::PackedBlocks&,
                                            const kernels::BlockIds&,
                                            std::uint32_t,
                                            cudaStream_t);

  static kernels::SeededBlocks seeded(std::span<const kernels::SeededBlock> blocks,
                                      std::size_t first) {
    kernels::SeededBlocks batch;
    batch.count = static_cast<std::uint32_t>(
        std::min<std::size_t>(kernels::kMaxSeededPerLaunch, blocks.size() - first));
    std::copy_n(blocks.begin() + static_cast<std::ptrdiff_t>(first), batch.count, batch.blocks);
    return batch;
  }

  static kernels::BlockIds block_ids(std::span<const std::uint32_t> ids, std::size_t first) {
    kernels::BlockIds batch;
    batch.count = static_cast<std::uint32_t>(
        std::min<std::size_t>(kernels::kMaxBlocksPerLaunch, ids.size() - first));
    std::copy_n(ids.begin() + static_cast<std::ptrdiff_t>(first), batch.count, batch.ids);
    return batch;
  }

  static Status check_results(PinnedBuffer& results, std::size_t count) {
    if (results.size_bytes() >= count * sizeof(std::uint64_t)) return ok();
    return KVFERRY_ERROR(kInvalidArgument, "result buffer holds {} bytes, {} words are needed",
                         results.size_bytes(), count);
  }

  Status block_copy(const RegionTable& table,
                    std::span<const std::uint32_t> ids,
                    DevicePtr packed,
                    std::uint64_t packed_stride,
                    BlockCopyLauncher launch) {
    const DeviceGuard guard(*context_);
    kernels::PackedBlocks layout;
    layout.regions = table.regions().data();
    layout.region_count = static_cast<std::uint32_t>(table.regions().size());
    layout.packed_stride = packed_stride;
    for (std::size_t first = 0; first < ids.size(); first += kernels::kMaxBlocksPerLaunch) {
      layout.packed = static_cast<unsigned char*>((packed + first * packed_stride).raw());
      KVFERRY_CUDA_TRY(launch(layout, block_ids(ids, first), kStagingCtas, stream_));
    }
    return ok();
  }

  Status copy_batch(CopyDirection direction, std::span<const CopyOp> ops) {
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

  void drain_bounded() {
    const auto state = query();
    if (!state || *state) return;
    UniqueFd ended(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!ended.valid() || !notify(ended.get())) return;
    pollfd waited{ended.get(), POLLIN, 0};
    // wait: work of a stream that ends; kDestroyDrain; nothing
    if (::poll(&waited, 1, Deadline::after(kDestroyDrain).poll_timeout_ms()) > 0) return;
    log_error("cuda:{}: a stream still runs after {} s and is abandoned", context_->ordinal(),
              kDestroyDrain.count());
    // The host function still holds the descriptor's number: it stays open for good, so that no
    // other file gets it.
    static_cast<void>(ended.release());
  }

  ContextPtr context_;
  cudaStream_t stream_;
  // Kept between calls, so that warm batches allocate nothing.
  std::vector<void*> targets_;
  std::vector<const void*> sources_;
  std::vector<std::size_t> sizes_;
};

}  // namespace

Result<std::unique_ptr<Stream>> make_cuda_stream(ContextPtr context, StreamPriority priority) {
  const DeviceGuard guard(*context);
  int least = 0;
  int greatest = 0;
  KVFERRY_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t stream = nullptr;
  KVFERRY_CUDA_TRY(cudaStreamCreateWithPriority(
      &stream, cudaStreamNonBlocking, priority == StreamPriority::kHigh ? greatest : least));
  return std::unique_ptr<Stream>(std::make_unique<CudaStream>(std::move(context), stream));
}

Result<std::unique_ptr<PinnedBuffer>> make_cuda_pinned_buffer(ContextPtr context,
                                                              std::uint64_t size_bytes) {
  const DeviceGuard guard(*context);
  void* data = nullptr;
  // wait-driver: pinning of a small buffer; about 0.1 s per GiB
  KVFERRY_CUDA_TRY(cudaHostAlloc(&data, size_bytes, cudaHostAllocPortable | cudaHostAllocMapped));
  std::memset(data, 0, size_bytes);
  return std::unique_ptr<PinnedBuffer>(
      std::make_unique<CudaPinnedBuffer>(std::move(context), data, size_bytes));
}

}  // namespace kvferry::ipc
