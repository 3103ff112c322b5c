// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_stream.hpp"

#include "device/cuda_operations.hpp"
#include "device/cuda_recording.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <poll.h>
#include <sys/eventfd.h>

#include <cstring>
#include <memory>
#include <utility>

namespace kvferry::ipc {
namespace {

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

/// Where the host functions of a stream's notifications run. A host function stops the stream that
/// it is in until it has returned, some 50 us, in which a copy engine idles: here they wait for the
/// stream, and it does not wait for them. Of the highest priority, which makes sure that they do
/// not share a queue of the device with work of the engine that waits for a word, and with it for
/// what these tell of.
class Notices {
 public:
  /// Ready from the start: streams are not made while others wait for words, which may hold that
  /// up.
  [[nodiscard]] static Result<Notices> make(ContextPtr context) {
    Notices notices(std::move(context));
    int least = 0;
    int greatest = 0;
    KVFERRY_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    KVFERRY_CUDA_TRY(
        cudaStreamCreateWithPriority(&notices.stream_, cudaStreamNonBlocking, greatest));
    KVFERRY_CUDA_TRY(cudaEventCreateWithFlags(&notices.reached_, cudaEventDisableTiming));
    return notices;
  }
  Notices(Notices&& other) noexcept
      : context_(std::move(other.context_)),
        stream_(std::exchange(other.stream_, nullptr)),
        reached_(std::exchange(other.reached_, nullptr)) {}
  Notices& operator=(Notices&&) = delete;
  Notices(const Notices&) = delete;
  Notices& operator=(const Notices&) = delete;
  ~Notices() {
    if (context_ == nullptr) return;  // moved from
    const DeviceGuard guard(*context_);
    // wait-driver: nothing, the driver keeps what still runs; it is asynchronous
    if (stream_ != nullptr) warn(cudaStreamDestroy(stream_), "cudaStreamDestroy");
    // wait-driver: nothing, the driver keeps what still runs; it is asynchronous
    if (reached_ != nullptr) warn(cudaEventDestroy(reached_), "cudaEventDestroy");
  }

  /// Signals the eventfd when all work enqueued in the stream so far has ended.
  [[nodiscard]] Status add(cudaStream_t after, int event_fd) {
    const DeviceGuard guard(*context_);
    // A wait is for the last record before it: one event serves any number of them.
    KVFERRY_CUDA_TRY(cudaEventRecord(reached_, after));
    KVFERRY_CUDA_TRY(cudaStreamWaitEvent(stream_, reached_));
    KVFERRY_CUDA_TRY(cudaLaunchHostFunc(
        stream_, signal_event_fd, reinterpret_cast<void*>(static_cast<std::intptr_t>(event_fd))));
    return ok();
  }
  /// cudaSuccess when all of them have been signalled.
  [[nodiscard]] cudaError_t state() const { return cudaStreamQuery(stream_); }

 private:
  explicit Notices(ContextPtr context) : context_(std::move(context)) {}
  static void warn(cudaError_t error, const char* call) {
    if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
    log_warn("{}", cuda_error(error, call, __FILE__, __LINE__).to_string());
  }

  ContextPtr context_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t reached_ = nullptr;
};

class CudaStream final : public CudaOperations {
 public:
  CudaStream(ContextPtr context, cudaStream_t stream, Notices notices)
      : CudaOperations(std::move(context), stream), notices_(std::move(notices)) {}
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  ~CudaStream() override {
    const DeviceGuard guard(*context());
    drain_bounded();
    // wait-driver: nothing, the driver keeps what still runs; it is asynchronous
    if (const cudaError_t error = cudaStreamDestroy(stream());
        error != cudaSuccess && error != cudaErrorCudartUnloading) {
      log_warn("{}", cuda_error(error, "cudaStreamDestroy", __FILE__, __LINE__).to_string());
    }
  }

  [[nodiscard]] Result<std::unique_ptr<RecordedWork>> record(
      const std::function<Status(Stream&)>& body) override {
    return record_cuda_graph(context(), stream(), body);
  }

  [[nodiscard]] Status launch(const RecordedWork& work) override {
    return launch_cuda_graph(*context(), stream(), work);
  }

  [[nodiscard]] Status notify(int event_fd) override { return notices_.add(stream(), event_fd); }

  [[nodiscard]] Result<bool> query() override {
    const DeviceGuard guard(*context());
    // What has been notified has been signalled: its descriptor may be closed.
    cudaError_t state = cudaStreamQuery(stream());
    if (state == cudaSuccess) state = notices_.state();
    if (state == cudaErrorNotReady) {
      // Not an error, and yet kept as the last one: the next launch would report it as its own.
      static_cast<void>(cudaGetLastError());
      return false;
    }
    if (state != cudaSuccess) return cuda_error(state, "cudaStreamQuery", __FILE__, __LINE__);
    return true;
  }

 private:
  void drain_bounded() {
    const auto state = query();
    if (!state || *state) return;
    UniqueFd ended(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!ended.valid() || !notify(ended.get())) return;
    pollfd waited{ended.get(), POLLIN, 0};
    // wait: work of a stream that ends; kDestroyDrain; nothing
    if (::poll(&waited, 1, Deadline::after(kDestroyDrain).poll_timeout_ms()) > 0) return;
    log_error("cuda:{}: a stream still runs after {} s and is abandoned", context()->ordinal(),
              kDestroyDrain.count());
    // The host function still holds the descriptor's number: it stays open for good, so that no
    // other file gets it.
    static_cast<void>(ended.release());
  }

  Notices notices_;
};

}  // namespace

Result<std::unique_ptr<Stream>> make_cuda_stream(ContextPtr context, StreamPriority priority) {
  const DeviceGuard guard(*context);
  int least = 0;
  int greatest = 0;
  KVFERRY_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  KVFERRY_ASSIGN(Notices notices, Notices::make(context));
  cudaStream_t stream = nullptr;
  KVFERRY_CUDA_TRY(cudaStreamCreateWithPriority(
      &stream, cudaStreamNonBlocking, priority == StreamPriority::kHigh ? greatest : least));
  return std::unique_ptr<Stream>(
      std::make_unique<CudaStream>(std::move(context), stream, std::move(notices)));
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
