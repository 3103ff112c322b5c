// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "wire/message_ring.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace kvferry::ipc {

/// What goes before a message that a ring did not take: which connection, and its place among all
/// messages of that direction.
struct SequenceFrame {
  static constexpr std::size_t kBytes = 16;
  std::uint64_t connection = 0;
  std::uint64_t sequence = 0;

  [[nodiscard]] std::array<std::uint8_t, kBytes> to_bytes() const noexcept;
  [[nodiscard]] static std::optional<SequenceFrame> read(
      std::span<const std::uint8_t> bytes) noexcept;
};

/// One end of a connection's rings, one to each direction. Messages that are too large, or for
/// which there is no room just now, go over the connection's socket; each message has a number, and
/// the receiver takes them in the order of their numbers from wherever they come.
///
/// What is sent over the socket leaves later than what was put into the ring before it. So when a
/// message comes from the socket, all messages before it that went into the ring are there.
/// @threading one at a time.
class MessageChannel {
 public:
  /// Of each direction. Its largest message leaves room for others.
  static constexpr std::size_t kCapacity = std::size_t{128} << 10;
  static constexpr std::size_t kMaxMessageBytes = kCapacity / 4;
  static constexpr std::size_t kSegmentBytes = 2 * ring::segment_bytes(kCapacity);

  struct Made;
  /// The end of who makes the memory, and the descriptor for the other end.
  [[nodiscard]] static Result<Made> create(const std::string& name, std::uint64_t connection);
  /// The other end. kProtocol for memory of another size or without seals.
  [[nodiscard]] static Result<MessageChannel> join(const UniqueFd& fd, std::uint64_t connection);

  /// False: it has to go over the socket, as next_frame() says.
  [[nodiscard]] bool try_send(std::span<const std::uint8_t> message) noexcept;
  /// Whether the other end sleeps and has to be woken; true once for each of its sleeps.
  [[nodiscard]] bool take_bell() noexcept { return out_.take_bell(); }
  [[nodiscard]] SequenceFrame next_frame() const noexcept { return {connection_, sent_}; }
  /// The socket has taken the message of next_frame().
  void sent_over_socket() noexcept { ++sent_; }

  /// The next message when it is in the ring: valid until the next call. kProtocol, once, for a
  /// ring that cannot be; for a number that has been, that message is dropped.
  [[nodiscard]] Result<std::optional<std::span<const std::uint8_t>>> try_receive();
  /// Whether a message from the socket is of this connection.
  [[nodiscard]] bool is_ours(const SequenceFrame& frame) const noexcept {
    return frame.connection == connection_;
  }
  /// Whether messages that come before it have not been taken yet.
  [[nodiscard]] bool is_early(const SequenceFrame& frame) const noexcept {
    return frame.sequence > taken_;
  }
  /// A message from the socket is taken. False when its number has been.
  [[nodiscard]] bool take(const SequenceFrame& frame) noexcept;
  /// Before a wait for the bell; false when there is something to receive. A message that waits for
  /// one on the socket is not to be received.
  [[nodiscard]] bool ask_for_bell() noexcept;
  /// A look, for those that wait without sleeping.
  [[nodiscard]] bool has_record() const noexcept { return in_.has_record(); }

 private:
  MessageChannel(SharedMapping memory, bool made, std::uint64_t connection) noexcept;

  SharedMapping memory_;
  RingWriter out_;
  RingReader in_;
  std::uint64_t connection_;
  std::uint64_t sent_ = 0;
  std::uint64_t taken_ = 0;
  bool waits_for_socket_ = false;
};

/// The bell is a packet of one byte on the registry's connection, which is there anyway, tells its
/// end, and never holds up who rings. One that does not get through finds others before it.
void ring_bell(PacketSocket& socket) noexcept;
[[nodiscard]] bool is_bell(const Packet& packet) noexcept;

struct MessageChannel::Made {
  MessageChannel channel;
  UniqueFd fd;
};

}  // namespace kvferry::ipc
