// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/zmq_socket.hpp"

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/wire/codec.hpp"

#include <fmt/format.h>
#include <zmq.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr int kHandshakeMs = 5000;
constexpr int kReconnectFirstMs = 20;
constexpr int kReconnectMostMs = 1000;

Exception zmq_exception(const zmq::error_t& error, const std::string& what) {
  return Exception(
      KVFERRY_ERROR(kSystem, "{}: {} (ZeroMQ error {})", what, error.what(), error.num()));
}

}  // namespace

// No heartbeats: on a Unix socket the connection ends exactly when the peer closes it or dies, and
// pidfds tell which. A heartbeat would only find stopped processes, cut their connections, and so
// lose what is sent to them until they go on.
ZmqSocket::ZmqSocket(zmq::socket_type type, int max_queued)
    : socket_(context_, type),
      is_router_(type == zmq::socket_type::router),
      fd_(socket_.get(zmq::sockopt::fd)) {
  socket_.set(zmq::sockopt::linger, 0);
  socket_.set(zmq::sockopt::sndhwm, max_queued);
  socket_.set(zmq::sockopt::rcvhwm, max_queued);
  socket_.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(kMaxWireBytes));
  socket_.set(zmq::sockopt::handshake_ivl, kHandshakeMs);
  socket_.set(zmq::sockopt::heartbeat_ivl, 0);
}

ZmqSocket ZmqSocket::serve(const std::filesystem::path& path, UniqueFd listening, int max_queued) {
  try {
    ZmqSocket socket(zmq::socket_type::router, max_queued);
    socket.socket_.set(zmq::sockopt::router_mandatory, true);
    // A process that connects again under its name takes the name over from its old connection.
    socket.socket_.set(zmq::sockopt::router_handover, true);
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
    ZmqSocket socket(zmq::socket_type::dealer, max_queued);
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
  if (is_router_) {
    if (frame.size() == sizeof(IncarnationId::bytes)) {
      std::memcpy(message.sender.emplace().bytes.data(), frame.data(), frame.size());
    }
    if (!frame.more() || !receive_frame(frame)) {
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

int ZmqSocket::send(const IncarnationId* receiver, std::span<const std::uint8_t> body) noexcept {
  const auto send_frame = [this](std::span<const std::uint8_t> bytes, int flags) {
    int result = -1;
    do {
      result = zmq_send(socket_.handle(), bytes.data(), bytes.size(), flags | ZMQ_DONTWAIT);
    } while (result < 0 && zmq_errno() == EINTR);
    return result < 0 ? zmq_errno() : 0;
  };
  if (receiver != nullptr) {
    if (const int error = send_frame(receiver->bytes, ZMQ_SNDMORE); error != 0) return error;
  }
  return send_frame(body, 0);
}

void ZmqSocket::set_linger(std::chrono::milliseconds linger) noexcept {
  const int milliseconds = static_cast<int>(linger.count());
  (void)zmq_setsockopt(socket_.handle(), ZMQ_LINGER, &milliseconds, sizeof(milliseconds));
}

}  // namespace kvferry::ipc
