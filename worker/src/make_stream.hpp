// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/device/device.hpp"

#include <cstdint>
#include <memory>
#include <utility>

namespace kvferry::worker {

/// A stream for a part of the worker that cannot be without one; throws Exception.
[[nodiscard]] inline std::unique_ptr<ipc::Stream> make_stream(ipc::Device& device,
                                                              ipc::StreamPriority priority) {
  auto stream = device.make_stream(priority);
  if (!stream) throw ipc::Exception(std::move(stream).error());
  return std::move(stream).value();
}

/// Likewise.
[[nodiscard]] inline std::unique_ptr<ipc::PinnedBuffer> make_pinned(ipc::Device& device,
                                                                    std::uint64_t size_bytes) {
  auto buffer = device.make_pinned_buffer(size_bytes);
  if (!buffer) throw ipc::Exception(std::move(buffer).error());
  return std::move(buffer).value();
}

}  // namespace kvferry::worker
