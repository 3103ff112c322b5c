// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

/// One direction of messages between two processes: a ring of bytes in shared memory with one
/// writer and one reader, both lock-free. Neither trusts what the other can write: each keeps its
/// own position for itself, and takes from the memory only the other's.
///
///     offset  line 0: the writer's
///        0    u64  written  bytes ever written; only grows
///             line 1: the reader's
///      128    u64  read     bytes ever read; only grows
///             line 2: both
///      256    u32  asleep   1: the reader waits and wants a bell; the writer that takes it rings
///      384    the ring
///
/// A record is a u64 sequence number, a u32 size, a u32 zero, and the message, filled up to
/// kRecordAlign. It may go on at the ring's start.
///
/// Orders. written: store after the record is whole, load before it is read. read: store after the
/// record was copied out, load before it is overwritten. The reader stores asleep and then looks at
/// written, the writer stores written and then looks at asleep, all sequentially consistent: one of
/// the two sees the other.
namespace kvferry::ipc {

namespace ring {
inline constexpr std::size_t kWrittenOffset = 0;
inline constexpr std::size_t kReadOffset = 128;
inline constexpr std::size_t kAsleepOffset = 256;
inline constexpr std::size_t kDataOffset = 384;
inline constexpr std::size_t kRecordAlign = 16;
inline constexpr std::size_t kHeaderBytes = 16;

/// What a ring of that capacity takes in shared memory.
[[nodiscard]] constexpr std::size_t segment_bytes(std::size_t capacity) {
  return kDataOffset + capacity;
}
}  // namespace ring

/// The writing side. The memory outlives it. @threading one at a time.
class RingWriter {
 public:
  /// @pre segment has ring::segment_bytes(capacity) bytes, aligned to 128, zero at first; capacity
  /// is a multiple of ring::kRecordAlign.
  RingWriter(std::byte* segment, std::size_t capacity) noexcept;

  /// False when there is no room, which a reader that lies about its position has never.
  [[nodiscard]] bool try_write(std::uint64_t sequence,
                               std::span<const std::uint8_t> message) noexcept;
  /// Whether the reader waits and has to be woken; true once for each of its waits.
  [[nodiscard]] bool take_bell() noexcept;

 private:
  void copy_in(std::uint64_t at, std::span<const std::uint8_t> bytes) noexcept;

  std::atomic<std::uint64_t>* written_word_;
  std::atomic<std::uint64_t>* read_word_;
  std::atomic<std::uint32_t>* asleep_word_;
  std::byte* data_;
  std::size_t capacity_;
  std::uint64_t written_ = 0;
};

/// The reading side. The memory outlives it. @threading one at a time.
class RingReader {
 public:
  /// @pre as of RingWriter.
  RingReader(std::byte* segment, std::size_t capacity) noexcept;

  /// The sequence number of the next record; nothing when there is none. kProtocol for a position
  /// or size that cannot be: nothing is ever read from this ring again.
  [[nodiscard]] Result<std::optional<std::uint64_t>> next();
  /// Takes the record that next() told of. Valid until the next call.
  [[nodiscard]] std::span<const std::uint8_t> take();
  /// Before a wait: from here on the writer rings. False when a record has come meanwhile: the
  /// caller goes on reading.
  [[nodiscard]] bool ask_for_bell() noexcept;
  /// A look, for those that wait without sleeping.
  [[nodiscard]] bool has_record() const noexcept;

 private:
  void copy_out(std::uint64_t at, std::span<std::uint8_t> bytes) const noexcept;

  std::atomic<std::uint64_t>* written_word_;
  std::atomic<std::uint64_t>* read_word_;
  std::atomic<std::uint32_t>* asleep_word_;
  const std::byte* data_;
  std::size_t capacity_;
  std::uint64_t read_ = 0;
  std::size_t next_bytes_ = 0;  ///< Of the message that next() told of.
  bool broken_ = false;
  Bytes message_;
};

}  // namespace kvferry::ipc
