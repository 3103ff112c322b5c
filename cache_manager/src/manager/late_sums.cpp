// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "manager/late_sums.hpp"

#include "kvferry/ipc/base/checksum.hpp"

#include <utility>

namespace kvferry::cache_manager {

bool LateSums::add(Block block) {
  const HostSlot slot = block.held->slot();
  const SlabShape& shape = pool_.shape(slot);
  const std::uint64_t shared = shape.bytes.replicated_bytes / shape.parts;
  const std::uint64_t own = shape.bytes.shard_bytes / shape.parts;
  const std::uint64_t of_nothing = ipc::checksum({});
  const std::size_t place = blocks_.size();
  Waiting waiting;
  block.sums.assign(shape.sums(), 0);
  for (std::uint32_t part = 0; part < shape.parts; ++part) {
    if ((block.parts >> part & 1U) == 0) continue;
    const std::uint32_t first = part * (shape.ranks + 1);
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      const SlotOffsets offsets = pool_.offsets(slot, ipc::Rank{rank});
      if (rank == 0 && shared > 0) expect(offsets.replicated + part * shared, {place, first, {}});
      if (own > 0) expect(offsets.shard + part * own, {place, first + rank + 1, rank});
      block.sums[first + rank + 1] = own > 0 ? 0 : of_nothing;
    }
    block.sums[first] = shared > 0 ? 0 : of_nothing;
    waiting.left += (shared > 0 ? 1U : 0U) + (own > 0 ? shape.ranks : 0U);
  }
  if (waiting.left == 0) return false;
  waiting.block = std::move(block);
  blocks_.push_back(std::move(waiting));
  ++awaited_;
  return true;
}

// Blocks do not meet: what was expected there before is over.
void LateSums::expect(std::uint64_t offset, const Place& place) {
  places_.insert_or_assign(offset, place);
}

std::vector<LateSums::Block> LateSums::told(std::uint32_t rank,
                                            std::span<const ipc::KeptSum> sums) {
  std::vector<Block> whole;
  for (const ipc::KeptSum& told : sums) {
    const auto at = places_.find(told.offset);
    if (at == places_.end() || told.sum == 0 || at->second.rank.value_or(rank) != rank) continue;
    Waiting& waiting = blocks_[at->second.block];
    if (waiting.block.job != told.job || waiting.block.held == nullptr) continue;
    std::uint64_t& sum = waiting.block.sums[at->second.sum];
    if (std::exchange(sum, told.sum) != 0) continue;
    places_.erase(at);
    if (--waiting.left > 0) continue;
    --awaited_;
    whole.push_back(std::exchange(waiting.block, {}));
  }
  return whole;
}

std::size_t LateSums::drop(std::size_t most) {
  std::size_t count = 0;
  for (; dropped_ < blocks_.size() && count < most; ++dropped_) {
    if (blocks_[dropped_].block.held == nullptr) continue;
    blocks_[dropped_].block = {};
    ++count;
  }
  awaited_ -= count;
  if (awaited_ == 0) {
    blocks_ = {};
    places_ = {};
    dropped_ = 0;
  }
  return count;
}

}  // namespace kvferry::cache_manager
