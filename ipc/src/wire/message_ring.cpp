// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/message_ring.hpp"

#include "base/message_order.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace kvferry::ipc {
namespace {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

template <typename T> std::atomic<T>* word(std::byte* segment, std::size_t offset) noexcept {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): shared memory of this layout
  return reinterpret_cast<std::atomic<T>*>(segment + offset);
}

constexpr std::size_t record_bytes(std::size_t message_bytes) {
  return (ring::kHeaderBytes + message_bytes + ring::kRecordAlign - 1) / ring::kRecordAlign *
         ring::kRecordAlign;
}

struct RecordHeader {
  std::uint64_t sequence = 0;
  std::uint32_t size_bytes = 0;
  std::uint32_t zero = 0;
};
static_assert(sizeof(RecordHeader) == ring::kHeaderBytes);

}  // namespace

RingWriter::RingWriter(std::byte* segment, std::size_t capacity) noexcept
    : written_word_(word<std::uint64_t>(segment, ring::kWrittenOffset)),
      read_word_(word<std::uint64_t>(segment, ring::kReadOffset)),
      asleep_word_(word<std::uint32_t>(segment, ring::kAsleepOffset)),
      data_(segment + ring::kDataOffset),
      capacity_(capacity) {}

bool RingWriter::try_write(std::uint64_t sequence, std::span<const std::uint8_t> message) noexcept {
  if (message.size() > capacity_) return false;
  const std::size_t needed = record_bytes(message.size());
  // Wraps to something huge for a reader that claims to be ahead of us.
  const std::uint64_t used = written_ - read_word_->load(std::memory_order_acquire);
  if (used > capacity_ || capacity_ - used < needed) return false;
  const RecordHeader header{sequence, static_cast<std::uint32_t>(message.size()), 0};
  std::array<std::uint8_t, sizeof(RecordHeader)> head{};
  std::memcpy(head.data(), &header, sizeof(header));
  copy_in(written_, head);
  copy_in(written_ + sizeof(header), message);
  written_ += needed;
  MessageOrder::before_send();
  written_word_->store(written_, std::memory_order_seq_cst);
  return true;
}

bool RingWriter::take_bell() noexcept {
  return asleep_word_->load(std::memory_order_seq_cst) != 0 &&
         asleep_word_->exchange(0, std::memory_order_seq_cst) != 0;
}

void RingWriter::copy_in(std::uint64_t at, std::span<const std::uint8_t> bytes) noexcept {
  const std::size_t place = at % capacity_;
  const std::size_t first = std::min(bytes.size(), capacity_ - place);
  if (first > 0) std::memcpy(data_ + place, bytes.data(), first);
  if (first < bytes.size()) std::memcpy(data_, bytes.data() + first, bytes.size() - first);
}

RingReader::RingReader(std::byte* segment, std::size_t capacity) noexcept
    : written_word_(word<std::uint64_t>(segment, ring::kWrittenOffset)),
      read_word_(word<std::uint64_t>(segment, ring::kReadOffset)),
      asleep_word_(word<std::uint32_t>(segment, ring::kAsleepOffset)),
      data_(segment + ring::kDataOffset),
      capacity_(capacity) {}

Result<std::optional<std::uint64_t>> RingReader::next() {
  if (broken_) return std::optional<std::uint64_t>();
  const std::uint64_t written = written_word_->load(std::memory_order_seq_cst);
  const std::uint64_t unread = written - read_;
  if (unread == 0) return std::optional<std::uint64_t>();
  MessageOrder::after_receive();
  if (unread > capacity_ || unread < sizeof(RecordHeader)) {
    broken_ = true;
    return KVFERRY_ERROR(kProtocol,
                         "message ring of {} bytes: its writer is at {}, its reader at {}",
                         capacity_, written, read_);
  }
  RecordHeader header;
  std::array<std::uint8_t, sizeof(RecordHeader)> head{};
  copy_out(read_, head);
  std::memcpy(&header, head.data(), sizeof(header));
  if (record_bytes(header.size_bytes) > unread || header.zero != 0) {
    broken_ = true;
    return KVFERRY_ERROR(kProtocol,
                         "message ring: a message of {} bytes (reserved word {}) where {} bytes "
                         "were written",
                         header.size_bytes, header.zero, unread);
  }
  next_bytes_ = header.size_bytes;
  return std::optional(header.sequence);
}

std::span<const std::uint8_t> RingReader::take() {
  message_.resize(next_bytes_);
  copy_out(read_ + sizeof(RecordHeader), message_);
  read_ += record_bytes(next_bytes_);
  read_word_->store(read_, std::memory_order_release);
  return message_;
}

bool RingReader::ask_for_bell() noexcept {
  if (broken_) return true;
  asleep_word_->store(1, std::memory_order_seq_cst);
  if (!has_record()) return true;
  asleep_word_->store(0, std::memory_order_seq_cst);
  return false;
}

bool RingReader::has_record() const noexcept {
  return !broken_ && written_word_->load(std::memory_order_seq_cst) != read_;
}

void RingReader::copy_out(std::uint64_t at, std::span<std::uint8_t> bytes) const noexcept {
  const std::size_t place = at % capacity_;
  const std::size_t first = std::min(bytes.size(), capacity_ - place);
  if (first > 0) std::memcpy(bytes.data(), data_ + place, first);
  if (first < bytes.size()) std::memcpy(bytes.data() + first, data_, bytes.size() - first);
}

}  // namespace kvferry::ipc
