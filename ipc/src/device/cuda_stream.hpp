// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/cuda_context.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <memory>

namespace kvferry::ipc {

[[nodiscard]] Result<std::unique_ptr<Stream>> make_cuda_stream(
    std::shared_ptr<const CudaContext> context, StreamPriority priority);

[[nodiscard]] Result<std::unique_ptr<PinnedBuffer>> make_cuda_pinned_buffer(
    std::shared_ptr<const CudaContext> context, std::uint64_t size_bytes);

}  // namespace kvferry::ipc
