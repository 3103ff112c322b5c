// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/lease/lease.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>

/// The shared words of the unlink handshake. They are the truth; messages are doorbells and
/// carriers of handles. Each process creates one segment of its own and is its only writer (the
/// memfd is sealed against writable mappings by others), so no peer can forge another's word.
///
/// Owner segment, one per session (kOwnerSegmentBytes):
///
///     offset  line 0: written once, before anybody can see the segment
///        0    u64  published   kOwnerMagic << 32 | kLeaseProtocolVersion, stored last
///        8    u64  nonce_high  session nonce
///       16    u64  nonce_low
///             line 1
///      128    u64  owner       epoch << 8 | phase: one indivisible value
///      136 ..  255 zero
///
/// Attacher segment, one per connection (kAttacherSegmentBytes):
///
///     offset  line 0: written once, before anybody can see the segment
///        0    u64  published   kAttacherMagic << 32 | kLeaseProtocolVersion, stored last
///        8    u64  nonce_high  incarnation
///       16    u64  nonce_low
///             line 1
///      128    u64  released    highest lease id fully let go of; only grows
///             line 2
///      256    u64  attached    lease id that is mapped now, or 0: for diagnostics
///             line 3
///      384    u64  beat        rounds of the attacher's thread: for diagnostics
///             line 4
///      512    u64  prepared    lease id under which this process has zeroed the epoch; only grows
///      520 ..  639 zero
///
/// Orders. published: release store, acquire load: who sees it sees the nonce. owner: release
/// store, acquire load: who sees Cleared(e) sees all that the owner did before. released: release
/// store strictly after the last close of the lease's memory, acquire load before the owner's free.
/// prepared: release store after the zeroing was observed complete, acquire load before the owner
/// lets anybody else take the epoch's contents as they are; the load of released comes first.
/// attached and beat: relaxed, nothing depends on them. All are 64 bits wide and lock-free.
namespace kvferry::ipc::words {

inline constexpr std::size_t kLineBytes = 128;  ///< Two cache lines: the adjacent-line prefetcher.

inline constexpr std::uint32_t kOwnerMagic = 0x4B564F57;     // "KVOW"
inline constexpr std::uint32_t kAttacherMagic = 0x4B564154;  // "KVAT"

inline constexpr std::size_t kPublishedOffset = 0;
inline constexpr std::size_t kNonceHighOffset = 8;
inline constexpr std::size_t kNonceLowOffset = 16;

inline constexpr std::size_t kOwnerWordOffset = kLineBytes;
inline constexpr std::size_t kOwnerSegmentBytes = 2 * kLineBytes;

inline constexpr std::size_t kReleasedOffset = kLineBytes;
inline constexpr std::size_t kAttachedOffset = 2 * kLineBytes;
inline constexpr std::size_t kBeatOffset = 3 * kLineBytes;
inline constexpr std::size_t kPreparedOffset = 4 * kLineBytes;
inline constexpr std::size_t kAttacherSegmentBytes = 5 * kLineBytes;

static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);
static_assert(kOwnerWordOffset % kLineBytes == 0 && kReleasedOffset % kLineBytes == 0 &&
              kAttachedOffset % kLineBytes == 0 && kBeatOffset % kLineBytes == 0 &&
              kPreparedOffset % kLineBytes == 0);
static_assert(kNonceLowOffset + sizeof(std::uint64_t) <= kLineBytes);
static_assert(kOwnerWordOffset + kLineBytes <= kOwnerSegmentBytes);
static_assert(kPreparedOffset + kLineBytes <= kAttacherSegmentBytes);

inline constexpr unsigned kPhaseBits = 8;
inline constexpr std::uint64_t kMaxEpoch = UINT64_MAX >> kPhaseBits;

[[nodiscard]] constexpr std::uint64_t published_value(std::uint32_t magic) noexcept {
  return std::uint64_t{magic} << 32 | kLeaseProtocolVersion;
}

/// The owner word, taken apart.
struct OwnerState {
  Epoch epoch;
  LeasePhase phase = LeasePhase::kVacant;
  friend constexpr bool operator==(const OwnerState&, const OwnerState&) = default;
};

[[nodiscard]] constexpr std::uint64_t pack(OwnerState state) noexcept {
  return state.epoch.value << kPhaseBits | static_cast<std::uint64_t>(state.phase);
}
/// A phase byte that names no phase is a protocol error of the owner: false.
[[nodiscard]] constexpr bool unpack(std::uint64_t word, OwnerState& state) noexcept {
  const std::uint64_t phase = word & ((1U << kPhaseBits) - 1);
  if (phase > static_cast<std::uint64_t>(LeasePhase::kShutdown)) return false;
  state = OwnerState{Epoch{word >> kPhaseBits}, static_cast<LeasePhase>(phase)};
  return true;
}

/// The transition relation of the whole word: phases as can_move() says, a new epoch with every
/// Ready and only there.
[[nodiscard]] constexpr bool can_move(OwnerState from, OwnerState to) noexcept {
  if (!ipc::can_move(from.phase, to.phase)) return false;
  if (to.phase == LeasePhase::kReady) return to.epoch.value == from.epoch.value + 1;
  return to.epoch == from.epoch;
}

}  // namespace kvferry::ipc::words
