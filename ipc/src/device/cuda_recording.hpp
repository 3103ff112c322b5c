// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_operations.hpp"

#include <functional>
#include <memory>

namespace kvferry::ipc {

/// Records what the body does as a CUDA graph. Its kernels get the priority of the given stream,
/// which is not touched otherwise.
[[nodiscard]] Result<std::unique_ptr<RecordedWork>> record_cuda_graph(
    const ContextPtr& context, cudaStream_t like, const std::function<Status(Stream&)>& body);

[[nodiscard]] Status launch_cuda_graph(const CudaContext& context,
                                       cudaStream_t stream,
                                       const RecordedWork& work);

}  // namespace kvferry::ipc
