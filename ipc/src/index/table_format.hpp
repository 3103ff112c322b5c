// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/keyed_hash.hpp"
#include "kvferry/ipc/index/prefix_table.hpp"
#include "kvferry/ipc/model/block_key.hpp"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

/// What a prefix table's memory holds: a header's page, then a table for each number of slots that
/// there may be, each twice as large as the one before; the header says which one is used.
namespace kvferry::ipc::prefix_table {

inline constexpr std::uint64_t kMagic = 0x6b76'7072'6566'6978;  // "kvprefix"
inline constexpr std::uint32_t kVersion = 2;
inline constexpr std::uint64_t kHeaderBytes = 4096;
inline constexpr std::uint32_t kLeastLog2 = 12;

struct Header {
  std::atomic<std::uint64_t> magic;  ///< Stored last.
  std::atomic<std::uint32_t> version;
  std::atomic<std::uint32_t> most_log2;
  /// Of the keys' hash: nobody makes up keys that meet in one place without having looked.
  std::atomic<std::uint64_t> seed;
  std::atomic<std::uint32_t> slots_log2;
  /// Odd while entries move; who saw none of what it looked for looks again when it has changed.
  std::atomic<std::uint64_t> moves;
};

struct Slot {
  std::atomic<std::uint64_t> low;   ///< Of the key's hash.
  std::atomic<std::uint64_t> rest;  ///< 0: empty. Else a Rest.
};
static_assert(sizeof(Slot) == 16 && sizeof(Header) <= kHeaderBytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

/// State (2 bits), run (22), the upper 40 bits of the hash's upper half.
enum class State : std::uint8_t { kEmpty = 0, kThere, kPending };
inline constexpr unsigned kStateBits = 2;
inline constexpr unsigned kTagShift = 24;

struct Hash {
  std::uint64_t tag = 0;  ///< 40 bits, by which its place is chosen, too.
  std::uint64_t low = 0;
};

/// Keyed by the root: who does not know that can neither compute what stands in the table for a
/// block that he can name, nor tell which entries are of one root.
[[nodiscard]] inline Hash hash_of(const BlockKey& key, std::uint64_t seed) noexcept {
  std::array<std::uint8_t, 28> bytes{};
  std::memcpy(bytes.data(), key.block.bytes.data(), 16);
  std::memcpy(bytes.data() + 16, &seed, 8);
  std::memcpy(bytes.data() + 24, &key.group.value, 4);
  const Digest digest = keyed_hash(key.root, bytes.data(), bytes.size());
  return {digest.high() >> kTagShift, digest.low()};
}

[[nodiscard]] inline std::uint64_t rest_of(const Hash& hash, const TableEntry& entry) noexcept {
  const auto state = static_cast<std::uint64_t>(entry.pending ? State::kPending : State::kThere);
  const std::uint64_t run = entry.run < PrefixTable::kMostRun ? entry.run : PrefixTable::kMostRun;
  return hash.tag << kTagShift | run << kStateBits | state;
}
[[nodiscard]] constexpr std::uint64_t tag_of(std::uint64_t rest) noexcept {
  return rest >> kTagShift;
}
[[nodiscard]] constexpr TableEntry entry_of(std::uint64_t rest) noexcept {
  const std::uint64_t state = rest & ((1U << kStateBits) - 1);
  return {state == static_cast<std::uint64_t>(State::kPending),
          static_cast<std::uint32_t>(rest >> kStateBits & PrefixTable::kMostRun)};
}

/// Of the table of so many slots, from the memory's start.
[[nodiscard]] constexpr std::uint64_t offset_of(std::uint32_t slots_log2) noexcept {
  return kHeaderBytes +
         ((std::uint64_t{1} << slots_log2) - (std::uint64_t{1} << kLeastLog2)) * sizeof(Slot);
}
[[nodiscard]] constexpr std::uint64_t size_for(std::uint32_t most_log2) noexcept {
  return offset_of(most_log2 + 1);
}

}  // namespace kvferry::ipc::prefix_table
