// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/message_channel.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvferry::ipc {

std::array<std::uint8_t, SequenceFrame::kBytes> SequenceFrame::to_bytes() const noexcept {
  std::array<std::uint8_t, kBytes> bytes{};
  std::memcpy(bytes.data(), &connection, sizeof(connection));
  std::memcpy(bytes.data() + sizeof(connection), &sequence, sizeof(sequence));
  return bytes;
}

std::optional<SequenceFrame> SequenceFrame::read(std::span<const std::uint8_t> bytes) noexcept {
  if (bytes.size() != kBytes) return std::nullopt;
  SequenceFrame frame;
  std::memcpy(&frame.connection, bytes.data(), sizeof(frame.connection));
  std::memcpy(&frame.sequence, bytes.data() + sizeof(frame.connection), sizeof(frame.sequence));
  return frame;
}

void ring_bell(PacketSocket& socket) noexcept {
  constexpr std::uint8_t kBell = 1;
  // Busy: it has bells to hear. Closed: whoever sends finds out.
  (void)socket.send(std::span(&kBell, 1));
}

bool is_bell(const Packet& packet) noexcept {
  return packet.bytes.size() == 1 && packet.fds.empty();
}

MessageChannel::MessageChannel(SharedMapping memory, bool made, std::uint64_t connection) noexcept
    : memory_(std::move(memory)),
      out_(memory_.data() + (made ? ring::segment_bytes(kCapacity) : 0), kCapacity),
      in_(memory_.data() + (made ? 0 : ring::segment_bytes(kCapacity)), kCapacity),
      connection_(connection) {}

Result<MessageChannel::Made> MessageChannel::create(const std::string& name,
                                                    std::uint64_t connection) {
  // Reserved: memory that turns out to be missing would fault whoever writes.
  KVFERRY_ASSIGN(UniqueFd fd, SharedMemory::create_pool(name, kSegmentBytes, true));
  KVFERRY_ASSIGN(SharedMapping memory, SharedMemory::map_pool(fd, kSegmentBytes));
  return Made{MessageChannel(std::move(memory), true, connection), std::move(fd)};
}

Result<MessageChannel> MessageChannel::join(const UniqueFd& fd, std::uint64_t connection) {
  KVFERRY_ASSIGN(SharedMapping memory, SharedMemory::map_pool(fd, kSegmentBytes));
  return MessageChannel(std::move(memory), false, connection);
}

bool MessageChannel::try_send(std::span<const std::uint8_t> message) noexcept {
  if (message.size() > kMaxMessageBytes || !out_.try_write(sent_, message)) return false;
  ++sent_;
  return true;
}

Result<std::optional<std::span<const std::uint8_t>>> MessageChannel::try_receive() {
  KVFERRY_ASSIGN(const std::optional<std::uint64_t> sequence, in_.next());
  waits_for_socket_ = sequence && *sequence > taken_;
  if (!sequence || waits_for_socket_) return std::optional<std::span<const std::uint8_t>>();
  const std::span<const std::uint8_t> message = in_.take();
  if (*sequence < taken_) {
    return KVFERRY_ERROR(kProtocol, "message ring: message {} of {} bytes after message {}",
                         *sequence, message.size(), taken_);
  }
  ++taken_;
  return std::optional(message);
}

bool MessageChannel::take(const SequenceFrame& frame) noexcept {
  if (frame.sequence < taken_) return false;
  taken_ = frame.sequence + 1;
  waits_for_socket_ = false;
  return true;
}

bool MessageChannel::ask_for_bell() noexcept { return waits_for_socket_ || in_.ask_for_bell(); }

}  // namespace kvferry::ipc
