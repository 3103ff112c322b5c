// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/worker/caching_allocator.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace kvferry::worker {

using ipc::DevicePtr;
using ipc::Result;

namespace {

enum class Pool : std::uint8_t { kSmall, kLarge };

struct Segment {
  std::unique_ptr<ipc::DeviceMemory> memory;
  Pool pool = Pool::kLarge;
};

/// A block covers [address, + size) of one segment; the blocks of a segment cover it without gaps.
struct Block {
  std::uint64_t size_bytes = 0;
  Segment* segment = nullptr;
  bool used = false;
};

std::uint64_t segment_bytes_for(std::uint64_t block_bytes) {
  if (block_bytes <= CachingAllocator::kSmallRequestBytes) {
    return CachingAllocator::kSmallSegmentBytes;
  }
  if (block_bytes < CachingAllocator::kMediumRequestBytes) {
    return CachingAllocator::kMediumSegmentBytes;
  }
  return ipc::align_up(block_bytes, CachingAllocator::kSmallSegmentBytes);
}

/// A smaller rest of a large block would only splinter it.
std::uint64_t smallest_rest(Pool pool) {
  return pool == Pool::kSmall ? CachingAllocator::kAlignmentBytes
                              : CachingAllocator::kSmallRequestBytes;
}

}  // namespace

class CachingAllocator::Impl {
 public:
  Impl(ipc::Device& device, ipc::HandleKind handles) : device_(device), handles_(handles) {}

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  ~Impl() { KVFERRY_CHECK(stats_.used_blocks == 0, "allocator destroyed while blocks are used"); }

  Result<DevicePtr> allocate(std::uint64_t size_bytes) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t block_bytes = ipc::align_up(size_bytes, kAlignmentBytes);
    const Pool pool = block_bytes <= kSmallRequestBytes ? Pool::kSmall : Pool::kLarge;
    auto found = best_fit(pool, block_bytes);
    if (found == blocks_.end()) {
      auto added = add_segment(pool, segment_bytes_for(block_bytes));
      if (!added) {
        if (added.error().code != ipc::ErrorCode::kNoDeviceMemory) return std::move(added).error();
        const EmptiedCache emptied = release_free_segments();
        ipc::log_warn(
            "allocator: no device memory for {}; emptied the cache, freed {}, trying again",
            ipc::format_size(block_bytes), ipc::format_size(emptied.freed()));
        added = add_segment(pool, segment_bytes_for(block_bytes));
        if (!added) return std::move(added).error();
      }
      found = *added;
    }
    lend(found, block_bytes);
    return DevicePtr{found->first};
  }

  void give_back(DevicePtr address) noexcept {
    const std::lock_guard lock(mutex_);
    auto block = blocks_.find(address.address);
    KVFERRY_CHECK(block != blocks_.end() && block->second.used,
                  "scratch buffer given back that was not lent");
    block->second.used = false;
    stats_.used_bytes -= block->second.size_bytes;
    --stats_.used_blocks;
    ++stats_.free_blocks;
    merge_with_next(block);
    if (block != blocks_.begin()) {
      auto previous = std::prev(block);
      if (!previous->second.used && previous->second.segment == block->second.segment) {
        free_set(previous).erase({previous->second.size_bytes, previous->first});
        merge_with_next(previous);
        block = previous;
      }
    }
    free_set(block).emplace(block->second.size_bytes, block->first);
  }

  EmptiedCache empty_cache(EmptyReason reason) {
    const std::lock_guard lock(mutex_);
    ++stats_.empties;
    ++stats_.empties_for[static_cast<std::size_t>(reason) - 1];
    return release_free_segments();
  }

  AllocatorStats stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
  }

 private:
  using Blocks = std::map<std::uintptr_t, Block>;
  using FreeSet = std::set<std::pair<std::uint64_t, std::uintptr_t>>;  ///< By size, then address.

  FreeSet& free_set(Blocks::iterator block) {
    return block->second.segment->pool == Pool::kSmall ? free_small_ : free_large_;
  }

  Blocks::iterator best_fit(Pool pool, std::uint64_t block_bytes) {
    FreeSet& set = pool == Pool::kSmall ? free_small_ : free_large_;
    const auto found = set.lower_bound({block_bytes, 0});
    return found == set.end() ? blocks_.end() : blocks_.find(found->second);
  }

  Result<Blocks::iterator> add_segment(Pool pool, std::uint64_t segment_bytes) {
    KVFERRY_ASSIGN(auto memory, device_.allocate(segment_bytes, handles_, nullptr));
    const std::uintptr_t address = memory->address().address;
    const std::uint64_t got_bytes = memory->size_bytes();
    const auto [segment, inserted] = segments_.emplace(address, Segment{std::move(memory), pool});
    KVFERRY_CHECK(inserted, "the driver handed out one address twice");
    const auto block = blocks_.emplace(address, Block{got_bytes, &segment->second, false}).first;
    free_set(block).emplace(got_bytes, address);
    stats_.reserved_bytes += got_bytes;
    stats_.peak_reserved_bytes = std::max(stats_.peak_reserved_bytes, stats_.reserved_bytes);
    ++stats_.segments;
    ++stats_.free_blocks;
    return block;
  }

  /// Takes a free block out of the cache and cuts off what is not needed.
  void lend(Blocks::iterator block, std::uint64_t block_bytes) {
    free_set(block).erase({block->second.size_bytes, block->first});
    const std::uint64_t rest = block->second.size_bytes - block_bytes;
    if (rest >= smallest_rest(block->second.segment->pool)) {
      const auto cut = blocks_
                           .emplace(block->first + static_cast<std::uintptr_t>(block_bytes),
                                    Block{rest, block->second.segment, false})
                           .first;
      free_set(cut).emplace(rest, cut->first);
      block->second.size_bytes = block_bytes;
      ++stats_.free_blocks;
    }
    block->second.used = true;
    stats_.used_bytes += block->second.size_bytes;
    ++stats_.used_blocks;
    --stats_.free_blocks;
  }

  /// @pre block is free and in no free set; its free neighbour above joins it.
  void merge_with_next(Blocks::iterator block) {
    const auto next = std::next(block);
    if (next == blocks_.end() || next->second.used ||
        next->second.segment != block->second.segment) {
      return;
    }
    free_set(next).erase({next->second.size_bytes, next->first});
    block->second.size_bytes += next->second.size_bytes;
    blocks_.erase(next);
    --stats_.free_blocks;
  }

  EmptiedCache release_free_segments() {
    EmptiedCache emptied;
    emptied.reserved_before = stats_.reserved_bytes;
    for (auto segment = segments_.begin(); segment != segments_.end();) {
      const auto block = blocks_.find(segment->first);
      const std::uint64_t segment_bytes = segment->second.memory->size_bytes();
      if (block->second.used || block->second.size_bytes != segment_bytes) {
        ++segment;
        continue;
      }
      if (const auto released = segment->second.memory->release(); !released) {
        ipc::log_error("allocator: segment of {} is not released: {}",
                       ipc::format_size(segment_bytes), released.error().to_string());
        ++segment;
        continue;
      }
      free_set(block).erase({segment_bytes, block->first});
      blocks_.erase(block);
      segment = segments_.erase(segment);
      stats_.reserved_bytes -= segment_bytes;
      --stats_.segments;
      --stats_.free_blocks;
    }
    emptied.reserved_after = stats_.reserved_bytes;
    emptied.used_after = stats_.used_bytes;
    return emptied;
  }

  ipc::Device& device_;
  const ipc::HandleKind handles_;
  mutable std::mutex mutex_;  ///< Guards everything below.
  std::map<std::uintptr_t, Segment> segments_;
  Blocks blocks_;  ///< Points into segments_, whose nodes do not move.
  FreeSet free_small_;
  FreeSet free_large_;
  AllocatorStats stats_;
};

ScratchBuffer::~ScratchBuffer() {
  if (owner_ != nullptr) owner_->give_back(address_);
}

CachingAllocator::CachingAllocator(ipc::Device& device, ipc::HandleKind handles)
    : impl_(std::make_unique<Impl>(device, handles)) {}

CachingAllocator::~CachingAllocator() = default;

Result<ScratchBuffer> CachingAllocator::allocate(std::uint64_t size_bytes) {
  if (size_bytes == 0 || size_bytes > (1ULL << 62)) {
    return KVFERRY_ERROR(kInvalidArgument, "allocation of {} bytes; ask for 1 to 2^62", size_bytes);
  }
  KVFERRY_ASSIGN(const DevicePtr address, impl_->allocate(size_bytes));
  return ScratchBuffer(this, address, size_bytes);
}

EmptiedCache CachingAllocator::empty_cache(EmptyReason reason) {
  const EmptiedCache emptied = impl_->empty_cache(reason);
  ipc::log_debug("allocator: {}: reserved {} -> {} (freed {})", to_string(reason),
                 ipc::format_size(emptied.reserved_before),
                 ipc::format_size(emptied.reserved_after), ipc::format_size(emptied.freed()));
  return emptied;
}

AllocatorStats CachingAllocator::stats() const { return impl_->stats(); }

void CachingAllocator::give_back(DevicePtr address) noexcept { impl_->give_back(address); }

}  // namespace kvferry::worker
