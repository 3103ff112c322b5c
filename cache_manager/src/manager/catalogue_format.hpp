// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/size.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

/// What the memory of a pool's catalogue holds: a page for the header, then its users, roots and
/// slabs, then an area for each page of the pool with the records of the blocks that begin there.
/// Most of it is never touched, and takes no memory.
///
/// One writer, which may be killed at any instruction. So each record has a check over all that it
/// says, which is zero while it is written: a record without a right check says nothing.
namespace kvferry::cache_manager::catalogue {

inline constexpr std::uint64_t kMagic = 0x6b76'6361'7461'6c67;  // "kvcatalg"
/// Of the format. Who finds another one has no use for the pool.
inline constexpr std::uint32_t kVersion = 5;
inline constexpr std::uint64_t kPage = 4096;
inline constexpr std::uint32_t kUsers = 4096;
inline constexpr std::uint32_t kRoots = 1024;
inline constexpr std::size_t kEngineName = 72;
inline constexpr std::size_t kNamespaceName = 128;
/// Of one block, over its parts and ranks.
inline constexpr std::uint32_t kMostSums = 64 * 65;
/// An area has this share of its page: blocks whose record would be a larger one of theirs are not
/// in the catalogue.
inline constexpr std::uint64_t kAreaShare = 16;

struct Header {
  std::uint64_t check;
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t pages;
  std::uint64_t page_bytes;
  std::uint64_t pool_bytes;
  std::uint64_t total_bytes;
  ipc::Digest pool;
};
/// Behind the header, by itself: it changes.
struct Progress {
  std::uint64_t filled_bytes;  ///< Of the pool have memory, from its start.
  std::uint64_t served_ns;     ///< CLOCK_MONOTONIC: when its last manager took it.
};

enum class UserKind : std::uint8_t { kWorker = 1, kMover, kEngine };

/// A process that may copy to and from the pool, or owns sequences in it.
struct User {
  std::uint64_t check;
  std::uint32_t pid;
  std::uint32_t kind;  ///< UserKind
  std::uint64_t start_time;
  ipc::Digest incarnation;
  std::uint64_t spare;
};

/// What all keys of a model begin with.
struct Root {
  std::uint64_t check;
  ipc::Digest root;
  ipc::Digest fingerprint;
  ipc::Digest proof;  ///< Of the namespace's key; zero: it has none.
  std::uint32_t name_space_bytes;
  std::uint32_t engine_bytes;
  std::array<char, kEngineName> engine;  ///< The last one that used it.
  std::array<char, kNamespaceName> name_space;
};

/// In the place of its first page.
struct Slab {
  std::uint64_t check;
  std::uint32_t pages;
  std::uint32_t capacity;
  std::uint32_t group;
  std::uint32_t ranks;
  std::uint64_t replicated_bytes;
  std::uint64_t shard_bytes;
  std::uint64_t shard_base;
  std::uint64_t shard_stride;
  ipc::Digest fingerprint;
  std::uint64_t parts;
  std::array<std::uint64_t, 6> spare;
};

enum class BlockState : std::uint8_t {
  kNone = 0,
  kTaken,    ///< Somebody may write it.
  kVisible,  ///< It is what its key says.
  /// A part of a sequence that is swapped out: block names its owner, before handle and index.
  kSequence,
};

/// What is behind a block's record.
enum class SumsState : std::uint8_t {
  kNone = 0,
  kKnown,  ///< The checksums.
  /// Nothing yet: the job that stored it and its parts, a bit for each, by which the next manager
  /// tells whether checksums that it hears of are of this.
  kAwaited,
};

/// Followed by a checksum for what the ranks share and for each rank's bytes, of each part; zeros
/// for a part that was not stored.
struct Block {
  std::uint64_t check;
  ipc::Digest block;
  ipc::Digest before;
  std::uint16_t root;
  BlockState state;
  SumsState sums;
  /// When it was used last, counted in uses of prefixes. Changes by itself: not in the check.
  std::uint32_t used;
};

static_assert(sizeof(Header) + sizeof(Progress) <= kPage);
static_assert(sizeof(User) == 48 && sizeof(Root) == 264 && sizeof(Slab) == 128);
static_assert(sizeof(Block) == 48);
static_assert(std::is_trivially_copyable_v<Root> && std::is_trivially_copyable_v<Block>);

/// Where what is, for a pool of so many pages.
struct Layout {
  std::uint64_t users = kPage;
  std::uint64_t roots = 0;
  std::uint64_t slabs = 0;
  std::uint64_t areas = 0;
  std::uint64_t area_bytes = 0;  ///< Of one page.
  std::uint64_t total = 0;

  Layout(std::uint32_t pages, std::uint64_t page_bytes)
      : roots(users + ipc::align_up(kUsers * sizeof(User), kPage)),
        slabs(roots + ipc::align_up(kRoots * sizeof(Root), kPage)),
        areas(slabs + ipc::align_up(std::uint64_t{pages} * sizeof(Slab), kPage)),
        area_bytes(page_bytes / kAreaShare / 64 * 64),
        total(ipc::align_up(areas + pages * area_bytes, kPage)) {}
};

/// Of a block with so many checksums.
[[nodiscard]] constexpr std::uint64_t record_bytes(std::uint32_t sums) noexcept {
  const std::uint64_t bytes = sizeof(Block) + std::uint64_t{sums} * sizeof(std::uint64_t);
  return (bytes + 63) / 64 * 64;
}

}  // namespace kvferry::cache_manager::catalogue
