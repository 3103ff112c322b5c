// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/zmq_socket.hpp"

#include "base/message_order.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/descriptors.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <fmt/format.h>
#include <unistd.h>
#include <zmq.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr int kHandshakeMs = 5000;
constexpr int kReconnectFirstMs = 20;
constexpr int kReconnectMostMs = 1000;
// A context with its threads and a socket, with some for what others open meanwhile.
constexpr std::size_t kContextDescriptors = 16;

/// A message on its way out, and whose it is.
struct Leaving {
  Bytes body;
  std::shared_ptr<SendQueue> queue;

  // On ZeroMQ's thread, or on the sender's when it could not be sent.
  static void gone(void* /*data*/, void* self) {
    const std::unique_ptr<Leaving> leaving(static_cast<Leaving*>(self));
    leaving->queue->left(leaving->body.size());
  }
};

Exception zmq_exception(const zmq::error_t& error, const std::string& what) {
  return Exception(
      KVFERRY_ERROR(kSystem, "{}: {} (ZeroMQ error {})", what, error.what(), error.num()));
}

// ZeroMQ ends the process when it finds no descriptor for one of its threads.
zmq::context_t make_context() {
  if (Status enough = need_descriptors(kContextDescriptors); !enough) {
    throw Exception(std::move(enough).error());
  }
  return {};
}

}  // namespace

// No heartbeats: on a Unix socket the connection ends exactly when the peer closes it or dies, and
// pidfds tell which. A heartbeat would only find stopped processes, cut their connections, and so
// lose what is sent to them until they go on.
ZmqSocket::ZmqSocket(zmq::socket_type type, int max_unsent, int max_unread)
    : context_(make_context()),
      socket_(context_, type),
      is_router_(type == zmq::socket_type::router),
      fd_(socket_.get(zmq::sockopt::fd)) {
  socket_.set(zmq::sockopt::linger, 0);
  socket_.set(zmq::sockopt::sndhwm, max_unsent);
  socket_.set(zmq::sockopt::rcvhwm, max_unread);
  socket_.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(kMaxWireBytes));
  socket_.set(zmq::sockopt::handshake_ivl, kHandshakeMs);
  socket_.set(zmq::sockopt::heartbeat_ivl, 0);
}

ZmqSocket ZmqSocket::serve(const std::filesystem::path& path, UniqueFd listening, int max_unread) {
  try {
    ZmqSocket socket(zmq::socket_type::router, 0, max_unread);
    socket.socket_.set(zmq::sockopt::router_mandatory, true);
    // A process that connects again under its name takes the name over from its old connection.
    socket.socket_.set(zmq::sockopt::router_handover, true);
    // The directory keeps other users out; should it ever be opened, this still does.
    const uid_t self = ::geteuid();
    if (zmq_setsockopt(socket.socket_.handle(), ZMQ_IPC_FILTER_UID, &self, sizeof(self)) != 0) {
      throw zmq::error_t();
    }
    // ZeroMQ's own bind would take the path from a living server, and unlink it late.
    socket.socket_.set(zmq::sockopt::use_fd, listening.get());
    socket.socket_.bind("ipc://" + path.native());
    (void)listening.release();
    return socket;
  } catch (const zmq::error_t& error) {
    throw zmq_exception(error, fmt::format("control socket {}", path.native()));
  }
}

ZmqSocket ZmqSocket::connect(const std::filesystem::path& path,
                             const IncarnationId& self,
                             int max_queued) {
  try {
    ZmqSocket socket(zmq::socket_type::dealer, max_queued, max_queued);
    socket.socket_.set(zmq::sockopt::routing_id,
                       zmq::const_buffer(self.bytes.data(), self.bytes.size()));
    socket.socket_.set(zmq::sockopt::reconnect_ivl, kReconnectFirstMs);
    socket.socket_.set(zmq::sockopt::reconnect_ivl_max, kReconnectMostMs);
    socket.socket_.connect("ipc://" + path.native());
    return socket;
  } catch (const zmq::error_t& error) {
    throw zmq_exception(error, fmt::format("connecting to control socket {}", path.native()));
  }
}

bool ZmqSocket::readable() noexcept {
  int events = 0;
  std::size_t size = sizeof(events);
  int result = -1;
  do {
    result = zmq_getsockopt(socket_.handle(), ZMQ_EVENTS, &events, &size);
  } while (result != 0 && zmq_errno() == EINTR);
  return result == 0 && (events & ZMQ_POLLIN) != 0;
}

std::optional<ZmqMessage> ZmqSocket::try_receive() noexcept {
  const auto receive_frame = [this](zmq::message_t& frame) {
    int result = -1;
    do {
      result = zmq_msg_recv(frame.handle(), socket_.handle(), ZMQ_DONTWAIT);
    } while (result < 0 && zmq_errno() == EINTR);
    return result >= 0;
  };

  ZmqMessage message;
  zmq::message_t frame;
  if (!receive_frame(frame)) return std::nullopt;
  MessageOrder::after_receive();
  if (is_router_) {
    if (frame.size() == sizeof(IncarnationId::bytes)) {
      std::memcpy(message.sender.emplace().bytes.data(), frame.data(), frame.size());
    }
    if (!frame.more() || !receive_frame(frame)) {
      message.single = false;
      return message;
    }
  }
  if (frame.more()) {
    message.sequence =
        SequenceFrame::read({static_cast<const std::uint8_t*>(frame.data()), frame.size()});
    if (message.sequence && !receive_frame(frame)) {
      message.single = false;
      return message;
    }
  }
  message.body = std::move(frame);
  // Frames of one message arrive together.
  for (bool more = message.body.more(); more;) {
    message.single = false;
    zmq::message_t extra;
    more = receive_frame(extra) && extra.more();
  }
  return message;
}

int ZmqSocket::send_frame(std::span<const std::uint8_t> bytes, int flags) noexcept {
  int result = -1;
  do {
    result = zmq_send(socket_.handle(), bytes.data(), bytes.size(), flags | ZMQ_DONTWAIT);
  } while (result < 0 && zmq_errno() == EINTR);
  return result < 0 ? zmq_errno() : 0;
}

int ZmqSocket::send(const IncarnationId* receiver,
                    const std::optional<SequenceFrame>& sequence,
                    std::span<const std::uint8_t> body) noexcept {
  MessageOrder::before_send();
  if (receiver != nullptr) {
    if (const int error = send_frame(receiver->bytes, ZMQ_SNDMORE); error != 0) return error;
  }
  if (sequence) {
    if (const int error = send_frame(sequence->to_bytes(), ZMQ_SNDMORE); error != 0) return error;
  }
  return send_frame(body, 0);
}

int ZmqSocket::send(const IncarnationId& receiver,
                    const std::optional<SequenceFrame>& sequence,
                    Bytes body,
                    std::shared_ptr<SendQueue> queue) noexcept {
  MessageOrder::before_send();
  int refused = send_frame(receiver.bytes, ZMQ_SNDMORE);
  if (refused == 0 && sequence) refused = send_frame(sequence->to_bytes(), ZMQ_SNDMORE);
  if (refused != 0) {
    queue->left(body.size());
    return refused;
  }
  auto leaving = std::make_unique<Leaving>(Leaving{std::move(body), std::move(queue)});
  Bytes& bytes = leaving->body;
  zmq_msg_t message;
  if (zmq_msg_init_data(&message, bytes.data(), bytes.size(), &Leaving::gone, leaving.get()) != 0) {
    return zmq_errno();
  }
  (void)leaving.release();  // ZeroMQ calls gone(), whatever becomes of the message.
  int result = -1;
  do {
    result = zmq_msg_send(&message, socket_.handle(), ZMQ_DONTWAIT);
  } while (result < 0 && zmq_errno() == EINTR);
  if (result >= 0) return 0;
  const int error = zmq_errno();
  (void)zmq_msg_close(&message);
  return error;
}

void ZmqSocket::set_linger(std::chrono::milliseconds linger) noexcept {
  const int milliseconds = static_cast<int>(linger.count());
  (void)zmq_setsockopt(socket_.handle(), ZMQ_LINGER, &milliseconds, sizeof(milliseconds));
}

}  // namespace kvferry::ipc
