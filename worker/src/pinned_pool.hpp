// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/device/device.hpp"

#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace kvferry::worker {

/// Result buffers that are used again and again: pinning memory is far too slow for every step.
/// @threading one thread. @lifetime outlives the work that writes its buffers.
class PinnedPool {
 public:
  explicit PinnedPool(ipc::Device& device) : device_(device) {}

  /// Holds at least `words` 64-bit words, all zero.
  [[nodiscard]] ipc::Result<std::unique_ptr<ipc::PinnedBuffer>> take(std::size_t words) {
    const std::uint64_t size_bytes = std::bit_ceil(std::max<std::uint64_t>(words * 8, 4096));
    for (auto& free : free_) {
      if (free->size_bytes() < size_bytes) continue;
      std::swap(free, free_.back());
      auto taken = std::move(free_.back());
      free_.pop_back();
      std::memset(taken->data(), 0, words * 8);
      return taken;
    }
    KVFERRY_ASSIGN(auto made, device_.make_pinned_buffer(size_bytes));
    std::memset(made->data(), 0, words * 8);
    return made;
  }

  void give_back(std::unique_ptr<ipc::PinnedBuffer> buffer) {
    if (buffer != nullptr) free_.push_back(std::move(buffer));
  }

  /// Those that nobody has taken.
  void clear() { free_.clear(); }

  [[nodiscard]] static std::uint64_t word(ipc::PinnedBuffer& buffer, std::size_t index) {
    std::uint64_t value = 0;
    std::memcpy(&value, buffer.data() + index * sizeof(value), sizeof(value));
    return value;
  }

 private:
  ipc::Device& device_;
  std::vector<std::unique_ptr<ipc::PinnedBuffer>> free_;
};

}  // namespace kvferry::worker
