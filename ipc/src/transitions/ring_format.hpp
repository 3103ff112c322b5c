// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

/// The file of one process's transitions: a header, then two rings, each of a power of two of
/// records: the first for the handshake, the second for jobs, which come so often that they would
/// push the other ones out. Changing anything here changes kRingVersion.
namespace kvferry::ipc::transitions {

inline constexpr std::uint64_t kRingMagic = 0x6b76'6674'7261'6e73;  // "kvftrans"
inline constexpr std::uint32_t kRingVersion = 3;
inline constexpr std::size_t kRings = 2;
inline constexpr std::size_t kHandshakeRing = 0;
inline constexpr std::size_t kJobRing = 1;
inline constexpr std::size_t kMinRecords = 16;
inline constexpr std::size_t kMaxRecords = 1U << 20U;

struct RingHeader {
  std::atomic<std::uint64_t> magic;  ///< Stored last.
  std::uint32_t version;
  std::uint32_t pid;
  std::array<std::uint64_t, kRings> record_counts;
  std::array<std::uint64_t, 2> incarnation;  ///< High, low.
  std::uint32_t rank;
  std::array<char, 12> role;    ///< Ends with a zero.
  std::array<char, 68> engine;  ///< Ends with a zero.
  /// Steps begun so far; where the next one goes.
  std::array<std::atomic<std::uint64_t>, kRings> next;
};

/// A record is whole when its check fits: a reader looks without asking the writer, and a writer
/// can die in the middle.
struct RingRecord {
  std::atomic<std::uint64_t> number_and_check;  ///< Low half: number, from 1. Stored last.
  std::atomic<std::uint64_t> time_ns;
  std::atomic<std::uint64_t> transition_and_thread;  ///< Low half: transition.
  std::atomic<std::uint64_t> session;
  std::atomic<std::uint64_t> epoch;
  std::atomic<std::uint64_t> lease_or_job;
  std::atomic<std::uint64_t> peer;
  std::atomic<std::uint64_t> detail;
};

inline constexpr std::size_t kHeaderBytes = 256;
static_assert(sizeof(RingHeader) <= kHeaderBytes);
static_assert(sizeof(RingRecord) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(std::is_standard_layout_v<RingHeader> && std::is_standard_layout_v<RingRecord>);

/// The words of a record behind its first, in their order.
using RecordWords = std::array<std::uint64_t, 7>;

/// Whether it is no number of records that a ring can have.
constexpr bool is_bad_count(std::uint64_t records) noexcept {
  return records < kMinRecords || records > kMaxRecords || (records & (records - 1)) != 0;
}

using RecordCounts = std::array<std::uint64_t, kRings>;

/// Where a ring's records begin; of the ring behind the last: the size of the file.
constexpr std::size_t ring_offset(const RecordCounts& counts, std::size_t ring) noexcept {
  std::size_t offset = kHeaderBytes;
  for (std::size_t i = 0; i < ring; ++i) offset += counts[i] * sizeof(RingRecord);
  return offset;
}
constexpr std::size_t file_bytes(const RecordCounts& counts) noexcept {
  return ring_offset(counts, kRings);
}

/// First word of the record with this number (from 1) and these other words.
constexpr std::uint64_t seal(std::uint64_t number, const RecordWords& words) noexcept {
  std::uint64_t mix = number & 0xffff'ffffU;
  for (const std::uint64_t word : words) {
    mix = (mix ^ word) * 0x9e37'79b9'7f4a'7c15;
    mix ^= mix >> 29U;
  }
  return (number & 0xffff'ffffU) | (mix & 0xffff'ffff'0000'0000U);
}

}  // namespace kvferry::ipc::transitions
