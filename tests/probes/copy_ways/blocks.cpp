// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "probes/copy_ways/blocks.hpp"

#include <algorithm>
#include <numeric>
#include <random>

namespace kvferry::probes {
namespace {

std::vector<std::uint32_t> in_order(std::size_t count) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0U);
  return order;
}

std::vector<std::uint32_t> shuffled(std::size_t count, std::uint32_t seed) {
  std::vector<std::uint32_t> order = in_order(count);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  return order;
}

}  // namespace

BlockSequence::BlockSequence(std::span<std::byte> arena,
                             std::span<std::byte> far,
                             FarSide far_side,
                             std::uint32_t chunk_bytes)
    : arena_(arena),
      far_(far),
      far_side_(far_side),
      chunk_bytes_(chunk_bytes),
      arena_order_(shuffled(pitch_bytes() / chunk_bytes, 1)),
      far_order_(far_side == FarSide::kHostPool ? shuffled(far.size() / block_bytes(), 2)
                                                : in_order(far.size() / block_bytes())) {}

BlockPair BlockSequence::pair(std::uint64_t block) const {
  return {arena_order_[block % arena_order_.size()], far_order_[block % far_order_.size()]};
}

Piece BlockSequence::chunk(std::uint64_t block, std::uint32_t region) const {
  const BlockPair at = pair(block);
  return {
      arena_.data() + region * pitch_bytes() + std::size_t{at.arena} * chunk_bytes_,
      far_.data() + at.far * block_bytes() + std::size_t{region} * chunk_bytes_,
      chunk_bytes_,
  };
}

cudaMemcpyKind BlockSequence::copy_kind(Direction direction) const {
  if (far_side_ == FarSide::kDeviceRing) {
    return cudaMemcpyDeviceToDevice;
  }
  return direction == Direction::kToHost ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
}

}  // namespace kvferry::probes
