// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_recording.hpp"

#include "device/stream_arguments.hpp"
#include "kvferry/ipc/base/log.hpp"

#include <string_view>
#include <utility>

namespace kvferry::ipc {
namespace {

void warn_unless_ended(cudaError_t error, std::string_view what) {
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  log_warn("{}", cuda_error(error, what, __FILE__, __LINE__).to_string());
}

/// A CUDA stream for one capture. What a capture that has not been taken left is thrown away.
class CaptureStream {
 public:
  CaptureStream() = default;
  CaptureStream(const CaptureStream&) = delete;
  CaptureStream& operator=(const CaptureStream&) = delete;
  ~CaptureStream() {
    if (graph_ != nullptr) warn_unless_ended(cudaGraphDestroy(graph_), "cudaGraphDestroy");
    if (stream_ == nullptr) return;
    if (captures_) abandon();
    // wait-driver: nothing; no work ever ran in the stream, and it is asynchronous
    warn_unless_ended(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }

  [[nodiscard]] cudaStream_t raw() const noexcept { return stream_; }

  [[nodiscard]] Status begin(cudaStream_t like) {
    int priority = 0;
    KVFERRY_CUDA_TRY(cudaStreamGetPriority(like, &priority));
    KVFERRY_CUDA_TRY(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority));
    // Relaxed: the first launch of a kernel loads it, which the other modes may refuse in this
    // thread. The capture has a stream of its own, so that nobody's calls can get into it.
    KVFERRY_CUDA_TRY(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed));
    captures_ = true;
    return ok();
  }

  /// @lifetime the graph is this object's.
  [[nodiscard]] Result<cudaGraph_t> end() {
    captures_ = false;
    KVFERRY_CUDA_TRY(cudaStreamEndCapture(stream_, &graph_));
    return graph_;
  }

 private:
  // After a failed call the capture may have been invalidated, and ending it says that once more.
  void abandon() {
    cudaGraph_t unfinished = nullptr;
    if (cudaStreamEndCapture(stream_, &unfinished) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
    }
    if (unfinished != nullptr) warn_unless_ended(cudaGraphDestroy(unfinished), "cudaGraphDestroy");
  }

  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  bool captures_ = false;
};

class CudaRecordedWork final : public RecordedWork {
 public:
  CudaRecordedWork(ContextPtr context, cudaGraphExec_t graph)
      : context_(std::move(context)), graph_(graph) {}
  CudaRecordedWork(const CudaRecordedWork&) = delete;
  CudaRecordedWork& operator=(const CudaRecordedWork&) = delete;
  ~CudaRecordedWork() override {
    const DeviceGuard guard(*context_);
    warn_unless_ended(cudaGraphExecDestroy(graph_), "cudaGraphExecDestroy");
  }

  [[nodiscard]] int ordinal() const noexcept { return context_->ordinal(); }
  [[nodiscard]] cudaGraphExec_t graph() const noexcept { return graph_; }

 private:
  ContextPtr context_;
  cudaGraphExec_t graph_;
};

/// The stream that record() hands to the body.
class CudaRecorder final : public CudaOperations {
 public:
  CudaRecorder(ContextPtr context, cudaStream_t stream)
      : CudaOperations(std::move(context), stream) {}

  // One by one: a graph has a node for each copy and is launched as a whole, so that a batched call
  // gains nothing.
  [[nodiscard]] Status copy(CopyDirection direction,
                            std::span<const CopyOp> ops,
                            CopyMode /*mode*/) override {
    return CudaOperations::copy(direction, ops, CopyMode::kEach);
  }

  [[nodiscard]] Result<std::unique_ptr<RecordedWork>> record(
      const std::function<Status(Stream&)>& /*body*/) override {
    return not_recordable(device_name(), "record");
  }
  [[nodiscard]] Status launch(const RecordedWork& /*work*/) override {
    return not_recordable(device_name(), "launch");
  }
  [[nodiscard]] Status notify(int /*event_fd*/) override {
    return not_recordable(device_name(), "notify");
  }
  [[nodiscard]] Result<bool> query() override { return not_recordable(device_name(), "query"); }
};

}  // namespace

Result<std::unique_ptr<RecordedWork>> record_cuda_graph(
    const ContextPtr& context, cudaStream_t like, const std::function<Status(Stream&)>& body) {
  const DeviceGuard guard(*context);
  CaptureStream capture;
  KVFERRY_TRY(capture.begin(like));
  CudaRecorder recorder(context, capture.raw());
  KVFERRY_TRY(body(recorder));
  KVFERRY_ASSIGN(cudaGraph_t graph, capture.end());
  cudaGraphExec_t executable = nullptr;
  KVFERRY_CUDA_TRY(cudaGraphInstantiate(&executable, graph, 0));
  return std::unique_ptr<RecordedWork>(std::make_unique<CudaRecordedWork>(context, executable));
}

Status launch_cuda_graph(const CudaContext& context,
                         cudaStream_t stream,
                         const RecordedWork& work) {
  const auto* recorded = dynamic_cast<const CudaRecordedWork*>(&work);
  if (recorded == nullptr || recorded->ordinal() != context.ordinal()) {
    return KVFERRY_ERROR(kInvalidArgument, "cuda:{}: launch of what another device recorded",
                         context.ordinal());
  }
  const DeviceGuard guard(context);
  KVFERRY_CUDA_TRY(cudaGraphLaunch(recorded->graph(), stream));
  return ok();
}

}  // namespace kvferry::ipc
