// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/codec.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

/// What the engine of `kvferry bench ablation` and a worker that copies by itself say to each
/// other, each message a packet: set-up with the pool's descriptor, ready, then requests and
/// replies. Both are of one program, so nothing here has a version.
namespace kvferry::cli {

/// How the worker copies.
enum class OwnStrategy : std::uint8_t {
  kStaged = 1,  ///< Gather and scatter kernels, and one copy for each slot of a ring.
  kStrided,     ///< A block's slices as the rows of strided copies.
  kBatch,       ///< All slices of a chunk in one batched call.
  kMemcpy,      ///< One copy for each slice.
  kDirect       ///< Whole blocks, and neighbours as one, of a block-first arena.
};
inline constexpr std::array kOwnStrategies = {OwnStrategy::kDirect, OwnStrategy::kStaged,
                                              OwnStrategy::kStrided, OwnStrategy::kBatch,
                                              OwnStrategy::kMemcpy};
[[nodiscard]] std::string_view to_string(OwnStrategy strategy) noexcept;
constexpr std::uint64_t wire_max(OwnStrategy) {
  return static_cast<std::uint64_t>(OwnStrategy::kDirect);
}

/// A request of so many fits a packet; a larger job goes in several.
inline constexpr std::size_t kMostCopyItems = 4096;
/// Requests without a reply: the replies to so many fit a socket whose other end does not read.
inline constexpr std::size_t kMostCopyRequests = 64;
/// The pool is registered in pieces of so many bytes, and no copy crosses from one into the next.
inline constexpr std::uint64_t kCopyPieceBytes = 64ULL << 20;

struct CopierSetUp {
  OwnStrategy strategy = OwnStrategy::kStaged;
  std::uint64_t pool_bytes = 0;  ///< Of the memory behind the packet's descriptor.
  template <typename V> void visit(V& v) { v(strategy, pool_bytes); }
};

/// The arena and the pool are there: requests are served.
struct CopierReady {
  ipc::Digest fingerprint;  ///< Of the geometry, as the copier made its arena.
  std::uint64_t arena_bytes = 0;
  template <typename V> void visit(V& v) { v(fingerprint, arena_bytes); }
};

struct CopyItem {
  ipc::GroupId group;
  ipc::BlockId block;
  std::uint64_t pool_offset = 0;  ///< Of the packed block.
  template <typename V> void visit(V& v) { v(group, block, pool_offset); }
};

struct CopyRequest {
  std::uint64_t id = 0;  ///< Grows.
  ipc::CopyDirection direction = ipc::CopyDirection::kDeviceToHost;
  std::vector<CopyItem> items;
  template <typename V> void visit(V& v) { v(id, direction, items); }
};

/// All copies of the request were observed to have ended.
struct CopyReply {
  std::uint64_t id = 0;
  std::optional<ipc::Error> error;
  template <typename V> void visit(V& v) { v(id, error); }
};

/// Where the copies of a request may go.
struct CopyBounds {
  struct Group {
    std::uint32_t block_count = 0;
    std::uint64_t packed_bytes = 0;
  };
  std::vector<Group> groups;
  std::uint64_t pool_bytes = 0;
};
/// kProtocol for an id that is not greater than the last one, kInvalidArgument for a request that
/// is empty, too large, or leaves arena or pool.
[[nodiscard]] ipc::Status check_copy_request(const CopyRequest& request,
                                             std::uint64_t last_id,
                                             const CopyBounds& bounds);

}  // namespace kvferry::cli
