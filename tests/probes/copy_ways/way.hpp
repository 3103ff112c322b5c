// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "probes/copy_ways/blocks.hpp"
#include "probes/copy_ways/cuda_handles.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace kvferry::probes {

/// What is enqueued at a time, by ways of copy engines and by kernels: few calls, none of them
/// long.
inline constexpr std::size_t kEngineCallBytes = std::size_t{8} << 20;
inline constexpr std::size_t kKernelCallBytes = std::size_t{16} << 20;
inline constexpr std::size_t kLargeCopyBytes = std::size_t{32} << 20;
/// Calls that are enqueued before the first of them must have ended.
inline constexpr std::uint64_t kCallsAhead = 4;

/// One way to copy blocks, call after call.
/// @threading one at a time.
class Way {
 public:
  Way() = default;
  Way(const Way&) = delete;
  Way& operator=(const Way&) = delete;
  virtual ~Way() = default;

  /// Enqueues call number `call`. @throws std::runtime_error
  /// @stream what was copied is there when `stream` is; call `call - kCallsAhead` must be over.
  virtual void enqueue(std::uint64_t call, cudaStream_t stream) = 0;
  /// What that call copies.
  virtual std::vector<Piece> pieces(std::uint64_t call) const = 0;
  virtual std::size_t call_bytes() const = 0;
};

/// A way of which each call copies whole blocks of a sequence.
class BlockWay : public Way {
 public:
  /// Calls go over the sequence from `first_block` on.
  BlockWay(const BlockSequence& blocks,
           Direction direction,
           std::size_t call_bytes,
           std::uint64_t first_block)
      : blocks_(blocks),
        direction_(direction),
        blocks_per_call_(call_bytes / blocks.block_bytes()),
        first_block_(first_block) {}

  std::vector<Piece> pieces(std::uint64_t call) const override;
  std::size_t call_bytes() const override { return blocks_per_call_ * blocks_.block_bytes(); }

 protected:
  const BlockSequence& blocks() const { return blocks_; }
  Direction direction() const { return direction_; }
  std::uint64_t blocks_per_call() const { return blocks_per_call_; }
  /// The first block of a call. Ways that prepare some calls, and repeat them, say which.
  virtual std::uint64_t block_of(std::uint64_t call) const {
    return first_block_ + call * blocks_per_call_;
  }

 private:
  const BlockSequence& blocks_;
  Direction direction_;
  std::uint64_t blocks_per_call_;
  std::uint64_t first_block_;
};

/// A way and the stream that it is enqueued on, by a thread of its own.
struct Lane {
  std::unique_ptr<Way> way;
  Stream stream;
};

/// What the ways of a run have to copy, and how.
struct Scene {
  const BlockSequence& host_blocks;
  const BlockSequence& ring_blocks;
  Direction direction;
  double pace_gbps;  ///< of each thread block straight to host memory; 0: as fast as it can
};

struct WayKind {
  std::string name;
  std::string about;
  std::function<std::vector<Lane>(const Scene&)> lanes;
};

/// Name of the way that all others are compared with.
inline constexpr const char* kLargeCopyName = "large-copy";

/// All ways that are tried, one large copy first.
const std::vector<WayKind>& all_ways();

}  // namespace kvferry::probes
