// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/wire/codec.hpp"
#include "wire/message_channel.hpp"
#include "wire/send_queue.hpp"

#include <zmq.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>

namespace kvferry::ipc {

/// A message as it came from the socket, its sender's routing id taken off (ROUTER).
struct ZmqMessage {
  std::optional<IncarnationId> sender;    ///< Nothing when the routing id is none of ours.
  std::optional<SequenceFrame> sequence;  ///< Of a connection that has rings, too.
  zmq::message_t body;
  bool single = true;  ///< Exactly one body frame.

  [[nodiscard]] std::span<const std::uint8_t> bytes() const {
    return {static_cast<const std::uint8_t*>(body.data()), body.size()};
  }
};

/// A ROUTER or DEALER on a Unix path, with a context of its own and this project's settings. Never
/// blocks. Its descriptor is edge-like: after every send and receive, readable() tells whether a
/// message waits that the descriptor will not announce again.
/// @threading one at a time.
class ZmqSocket {
 public:
  /// A ROUTER that serves a listening socket, and reads at most max_unread messages of a peer
  /// ahead. What is sent is not bounded here: see SendQueue. Throws Exception.
  static ZmqSocket serve(const std::filesystem::path& path, UniqueFd listening, int max_unread);
  /// A DEALER that names itself and connects. Throws Exception.
  static ZmqSocket connect(const std::filesystem::path& path,
                           const IncarnationId& self,
                           int max_queued);

  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool readable() noexcept;
  [[nodiscard]] std::optional<ZmqMessage> try_receive() noexcept;
  /// 0, EAGAIN (queue full), EHOSTUNREACH (ROUTER: no such peer) or another errno.
  [[nodiscard]] int send(const IncarnationId* receiver,
                         const std::optional<SequenceFrame>& sequence,
                         std::span<const std::uint8_t> body) noexcept;
  /// The same with the message's bytes taken over, and counted in queue (where they were reserved)
  /// until they have left.
  [[nodiscard]] int send(const IncarnationId& receiver,
                         const std::optional<SequenceFrame>& sequence,
                         Bytes body,
                         std::shared_ptr<SendQueue> queue) noexcept;
  /// How long the end of this socket waits for messages that are still unsent.
  void set_linger(std::chrono::milliseconds linger) noexcept;

 private:
  ZmqSocket(zmq::socket_type type, int max_unsent, int max_unread);

  [[nodiscard]] int send_frame(std::span<const std::uint8_t> bytes, int flags) noexcept;

  // wait-brief: its destructor waits until ZeroMQ's threads have closed the socket; linger is 0, or
  // kFarewell
  zmq::context_t context_;
  zmq::socket_t socket_;  // ends before its context
  bool is_router_;
  int fd_ = -1;
};

}  // namespace kvferry::ipc
