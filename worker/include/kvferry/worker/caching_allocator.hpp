// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/device/device.hpp"
#include "kvferry/ipc/rank/emptied_cache.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace kvferry::worker {

using ipc::EmptiedCache;
using ipc::EmptyReason;

class CachingAllocator;

/// A piece of device memory on loan from a CachingAllocator; goes back to its cache when destroyed.
/// @lifetime the allocator outlives it; all device work on it has been observed complete before it
/// ends, because the next owner of the bytes may be handed them at once.
class ScratchBuffer {
 public:
  ScratchBuffer() = default;
  ScratchBuffer(ScratchBuffer&& other) noexcept
      : owner_(std::exchange(other.owner_, nullptr)),
        address_(std::exchange(other.address_, {})),
        size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  ScratchBuffer& operator=(ScratchBuffer&& other) noexcept {
    ScratchBuffer taken(std::move(other));
    std::swap(owner_, taken.owner_);
    std::swap(address_, taken.address_);
    std::swap(size_bytes_, taken.size_bytes_);
    return *this;
  }
  ScratchBuffer(const ScratchBuffer&) = delete;
  ScratchBuffer& operator=(const ScratchBuffer&) = delete;
  ~ScratchBuffer();

  [[nodiscard]] bool valid() const noexcept { return owner_ != nullptr; }
  [[nodiscard]] ipc::DevicePtr address() const noexcept { return address_; }
  /// As asked for; the block behind it may be larger.
  [[nodiscard]] std::uint64_t size_bytes() const noexcept { return size_bytes_; }

 private:
  friend class CachingAllocator;
  ScratchBuffer(CachingAllocator* owner, ipc::DevicePtr address, std::uint64_t size_bytes)
      : owner_(owner), address_(address), size_bytes_(size_bytes) {}

  CachingAllocator* owner_ = nullptr;
  ipc::DevicePtr address_;
  std::uint64_t size_bytes_ = 0;
};

static_assert(std::is_nothrow_move_constructible_v<ScratchBuffer>);

/// Counters of a CachingAllocator. Reading them changes nothing.
struct AllocatorStats {
  std::uint64_t reserved_bytes = 0;  ///< Taken from the driver: used plus cached.
  std::uint64_t used_bytes = 0;      ///< Lent out, rounded as the blocks are.
  std::uint64_t peak_reserved_bytes = 0;
  std::uint64_t segments = 0;
  std::uint64_t used_blocks = 0;
  std::uint64_t free_blocks = 0;
  std::uint64_t empties = 0;  ///< Calls of empty_cache().
  /// Of those, by EmptyReason (the first one's are at [0]).
  std::array<std::uint64_t, ipc::kEmptyReasons> empties_for{};
  [[nodiscard]] std::uint64_t empties_because(EmptyReason reason) const noexcept {
    return empties_for[static_cast<std::size_t>(reason) - 1];
  }
};

/// A caching device allocator of the kind that frameworks use: segments come from the driver and
/// are split into blocks; freed blocks merge with their neighbours and stay cached until
/// empty_cache(). Small requests share small segments, so that they do not splinter large ones.
/// When the driver refuses a segment, the cache is emptied and the request tried once more.
/// @threading any.
class CachingAllocator {
 public:
  static constexpr std::uint64_t kAlignmentBytes = 512;
  static constexpr std::uint64_t kSmallRequestBytes = 1ULL << 20;
  static constexpr std::uint64_t kSmallSegmentBytes = 2ULL << 20;
  static constexpr std::uint64_t kMediumRequestBytes = 10ULL << 20;
  static constexpr std::uint64_t kMediumSegmentBytes = 20ULL << 20;

  /// handles: what its segments can be shared by, should a tensor in one be lent to kvferry.
  explicit CachingAllocator(ipc::Device& device,
                            ipc::HandleKind handles = ipc::HandleKind::kLegacy);
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;
  /// @pre every ScratchBuffer is gone.
  ~CachingAllocator();

  /// kInvalidArgument for zero bytes, kNoDeviceMemory when the driver refuses even after the cache
  /// was emptied.
  [[nodiscard]] ipc::Result<ScratchBuffer> allocate(std::uint64_t size_bytes);

  /// Gives every segment without a used block back to the driver; touches no used block. Logs the
  /// reason and `reserved A -> B (freed C)`.
  EmptiedCache empty_cache(EmptyReason reason);

  /// A pure observation: never empties anything.
  [[nodiscard]] AllocatorStats stats() const;

 private:
  friend class ScratchBuffer;
  void give_back(ipc::DevicePtr address) noexcept;

  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::worker
