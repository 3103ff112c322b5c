// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/cuda_call.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <span>
#include <type_traits>

/// Owners of what the CUDA runtime hands out. What fails while it is given back is left unsaid: the
/// calls before have said it.
namespace kvferry::probes {

template <auto kRelease> struct ReleasedBy {
  template <typename T> void operator()(T* handle) const noexcept { kRelease(handle); }
};

using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, ReleasedBy<cudaStreamDestroy>>;
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, ReleasedBy<cudaEventDestroy>>;
using Graph = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, ReleasedBy<cudaGraphDestroy>>;
using GraphExec =
    std::unique_ptr<std::remove_pointer_t<cudaGraphExec_t>, ReleasedBy<cudaGraphExecDestroy>>;

enum class Priority { kOrdinary, kHighest };

inline Stream make_stream(Priority priority = Priority::kOrdinary) {
  int least = 0;
  int greatest = 0;
  KVFERRY_PROBE_CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  cudaStream_t stream = nullptr;
  KVFERRY_PROBE_CUDA(cudaStreamCreateWithPriority(
      &stream, cudaStreamNonBlocking, priority == Priority::kHighest ? greatest : least));
  return Stream(stream);
}

/// Whoever waits for it sleeps, so that the processor time of waits is not counted as that of
/// copies.
inline Event make_event() {
  cudaEvent_t event = nullptr;
  KVFERRY_PROBE_CUDA(
      cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
  return Event(event);
}

inline GraphExec instantiate(const Graph& graph) {
  cudaGraphExec_t exec = nullptr;
  KVFERRY_PROBE_CUDA(cudaGraphInstantiate(&exec, graph.get(), 0));
  return GraphExec(exec);
}

/// Memory that the device reaches, on the device or pinned on the host.
template <auto kRelease> class OwnedMemory {
 public:
  OwnedMemory() = default;
  OwnedMemory(void* start, std::size_t size_bytes)
      : start_(static_cast<std::byte*>(start)), size_bytes_(size_bytes) {}

  std::byte* data() const { return start_.get(); }
  std::span<std::byte> span() const { return {start_.get(), size_bytes_}; }

 private:
  std::unique_ptr<std::byte, ReleasedBy<kRelease>> start_;
  std::size_t size_bytes_ = 0;
};

inline void free_device(void* start) { cudaFree(start); }

using DeviceMemory = OwnedMemory<free_device>;
using PinnedMemory = OwnedMemory<cudaFreeHost>;

inline DeviceMemory allocate_device(std::size_t size_bytes) {
  void* start = nullptr;
  KVFERRY_PROBE_CUDA(cudaMalloc(&start, size_bytes));
  return {start, size_bytes};
}

inline PinnedMemory allocate_pinned(std::size_t size_bytes) {
  void* start = nullptr;
  KVFERRY_PROBE_CUDA(cudaHostAlloc(&start, size_bytes, cudaHostAllocDefault));
  return {start, size_bytes};
}

}  // namespace kvferry::probes
