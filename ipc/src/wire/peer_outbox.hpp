// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "wire/message_channel.hpp"
#include "wire/reply_cache.hpp"
#include "wire/send_queue.hpp"
#include "wire/zmq_socket.hpp"

#include <memory>
#include <optional>
#include <vector>

namespace kvferry::ipc {

/// What goes to one peer of a control server: its ring if it has one, its bounded queue, the
/// replies that are remembered, and which of them its full queue did not take. Those are sent when
/// there is room.
/// @threading the server's thread.
class PeerOutbox {
 public:
  PeerOutbox(Peer peer,
             std::optional<MessageChannel> channel,
             std::shared_ptr<SendQueue> queue,
             ReplyCache replies)
      : peer_(std::move(peer)),
        channel_(std::move(channel)),
        queue_(std::move(queue)),
        replies_(std::move(replies)) {}

  /// kBusy when the queue is full, kInvalidArgument beyond kMaxWireBytes, kNotFound when the peer
  /// has closed its connection. The registry's connection has the bell.
  [[nodiscard]] Status send(ZmqSocket& socket, PacketSocket& registry, Bytes bytes);
  /// Null for a peer without rings.
  [[nodiscard]] MessageChannel* channel() noexcept { return channel_ ? &*channel_ : nullptr; }

  /// Whether a request is new; see ReplyCache::begin().
  [[nodiscard]] ReplyCache::Lookup begin(RequestId request) { return replies_.begin(request); }
  /// Remembers an encoded reply. Refused: the full queue did not take it.
  void remember(RequestId request, Bytes reply, bool refused);
  /// Sends the remembered replies that the full queue did not take.
  void send_unsent(ZmqSocket& socket, PacketSocket& registry);
  /// Whether a queue that was found full has room again; true once.
  [[nodiscard]] bool take_writable() noexcept { return queue_->take_writable(); }
  /// For a new connection of the same process.
  [[nodiscard]] ReplyCache take_replies() { return std::move(replies_); }

 private:
  Peer peer_;
  std::optional<MessageChannel> channel_;
  std::shared_ptr<SendQueue> queue_;  // shared with the messages that have not left
  ReplyCache replies_;
  std::vector<RequestId> unsent_;
};

}  // namespace kvferry::ipc
