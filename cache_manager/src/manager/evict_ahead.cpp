// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/evict_ahead.hpp"

#include <algorithm>
#include <utility>

namespace kvferry::cache_manager {

void EvictAhead::look() {
  if (!marks_.is_on() || is_posted_ || !index_.evicts()) return;
  const HostPool::Stats pool = pool_.stats();
  if (pool.is_filling() || pool.placed_blocks == nothing_at_) return;
  const std::uint64_t low = marks_.low_of(pool.bytes);
  for (const SlabShape& shape : index_.recent_shapes()) {
    if (pool_.free_bytes_for(shape) < low) short_of_.push_back(shape);
  }
  if (!short_of_.empty()) turn_soon();
}

void EvictAhead::turn_soon() {
  is_posted_ = true;
  loop_.post([this, living = is_living_] {
    if (*living) turn();
  });
}

void EvictAhead::turn() {
  is_posted_ = false;
  const std::uint64_t high = marks_.high_of(pool_.stats().bytes);
  std::uint32_t left = kBlocksInATurn;
  while (!short_of_.empty()) {
    const SlabShape& shape = short_of_.back();
    if (pool_.free_bytes_for(shape) >= high) {
      short_of_.pop_back();
      continue;
    }
    if (left == 0) return turn_soon();
    const std::uint64_t before = index_.stats().evicted;
    if (!index_.evict_ahead(shape)) {
      nothing_at_ = pool_.stats().placed_blocks;
      short_of_.pop_back();
      continue;
    }
    const std::uint64_t went = index_.stats().evicted - before;  // a whole slab, perhaps
    evicted_ += went;
    left -= static_cast<std::uint32_t>(std::min<std::uint64_t>(left, went));
  }
}

}  // namespace kvferry::cache_manager
