// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/cuda_handles.hpp"
#include "probes/copy_ways/kernels.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvferry::probes {

/// Regions of an arena: a layer's keys or values each.
inline constexpr std::uint32_t kRegions = 64;

enum class Direction { kToHost, kToDevice };

/// The memory of one piece of a copy on both of its sides.
struct Piece {
  std::byte* arena;
  std::byte* far;
  std::size_t size_bytes;
};

struct CopyEnds {
  std::byte* from;
  std::byte* to;
};

inline CopyEnds ends_of(const Piece& piece, Direction direction) {
  return direction == Direction::kToHost ? CopyEnds{piece.arena, piece.far}
                                         : CopyEnds{piece.far, piece.arena};
}

/// What is on the far side of an arena's blocks.
enum class FarSide {
  kHostPool,    ///< pinned memory; blocks lie at random places of it
  kDeviceRing,  ///< device memory; blocks lie one after another, from the start again at the end
};

/// An endless sequence of blocks to copy. In the arena a block has a chunk in each region, all
/// regions at one pitch, and lies at a random place; on the far side it is packed.
/// @threading any: nothing changes after construction.
class BlockSequence {
 public:
  BlockSequence(std::span<std::byte> arena,
                std::span<std::byte> far,
                FarSide far_side,
                std::uint32_t chunk_bytes);

  Piece chunk(std::uint64_t block, std::uint32_t region) const;
  BlockPair pair(std::uint64_t block) const;

  std::span<std::byte> arena() const { return arena_; }
  std::span<std::byte> far() const { return far_; }
  std::uint32_t chunk_bytes() const { return chunk_bytes_; }
  std::size_t block_bytes() const { return std::size_t{chunk_bytes_} * kRegions; }
  std::size_t pitch_bytes() const { return arena_.size() / kRegions; }
  cudaMemcpyKind copy_kind(Direction direction) const;

 private:
  std::span<std::byte> arena_;
  std::span<std::byte> far_;
  FarSide far_side_;
  std::uint32_t chunk_bytes_;
  // Permutations: blocks that follow one another differ, so that what a call copies can be checked.
  std::vector<std::uint32_t> arena_order_;
  std::vector<std::uint32_t> far_order_;
};

}  // namespace kvferry::probes
