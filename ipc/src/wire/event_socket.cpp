// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/event_socket.hpp"

#include "base/message_order.hpp"
#include "kvferry/ipc/os/descriptors.hpp"
#include "kvferry/ipc/wire/kv_events.hpp"
#include "os/socket_address.hpp"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <zmq.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::string_view kIpcScheme = "ipc://";
constexpr std::string_view kTcpScheme = "tcp://";

// A context with its threads and a socket, with some for those that connect meanwhile.
constexpr std::size_t kEventDescriptors = 16;
// What a publisher is sent: subscriptions, and requests of a few bytes.
constexpr std::int64_t kMostRequestBytes = 4096;

Exception event_socket_exception(const zmq::error_t& error, const std::string& endpoint) {
  return Exception(KVFERRY_ERROR(kSystem, "KV events at {}: {} (ZeroMQ error {})", endpoint,
                                 error.what(), error.num()));
}

// ZeroMQ ends the process when it finds no descriptor for one of its threads.
zmq::context_t make_event_context() {
  if (Status enough = need_descriptors(kEventDescriptors); !enough) {
    throw Exception(std::move(enough).error());
  }
  return {};
}

struct HostAndPort {
  std::string host;
  std::uint16_t port = 0;
};

std::optional<HostAndPort> split_host_and_port(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return std::nullopt;
  std::string_view host = text.substr(0, colon);
  if (host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const std::string_view digits = text.substr(colon + 1);
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (host.empty() || digits.empty() || error != std::errc{} ||
      end != digits.data() + digits.size()) {
    return std::nullopt;
  }
  return HostAndPort{std::string(host), port};
}

/// A TCP address of this machine, of either family.
struct PortAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;

  [[nodiscard]] static std::optional<PortAddress> make(const HostAndPort& place) {
    PortAddress address;
    sockaddr_in four{};
    sockaddr_in6 six{};
    const std::string host = place.host == "*" ? "0.0.0.0" : place.host;
    if (::inet_pton(AF_INET, host.c_str(), &four.sin_addr) == 1) {
      four.sin_family = AF_INET;
      four.sin_port = htons(place.port);
      address.size = sizeof(four);
      std::memcpy(&address.bytes, &four, sizeof(four));
    } else if (::inet_pton(AF_INET6, host.c_str(), &six.sin6_addr) == 1) {
      six.sin6_family = AF_INET6;
      six.sin6_port = htons(place.port);
      address.size = sizeof(six);
      std::memcpy(&address.bytes, &six, sizeof(six));
    } else {
      return std::nullopt;
    }
    return address;
  }
  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  [[nodiscard]] sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
  [[nodiscard]] std::uint16_t port() const {
    sockaddr_in four{};  // both families have it at the same place
    std::memcpy(&four, &bytes, sizeof(four));
    return ntohs(four.sin_port);
  }
};

Result<UniqueFd> listen_on_tcp(const PortAddress& address, std::string_view name) {
  UniqueFd fd(::socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return KVFERRY_ERRNO("socket for {}", name);
  // Connections that ended a minute ago do not keep a port from its next holder; a living one does.
  const int yes = 1;
  if (::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0) {
    return KVFERRY_ERRNO("SO_REUSEADDR of {}", name);
  }
  if (::bind(fd.get(), address.get(), address.size) != 0) {
    if (errno == EADDRINUSE) {
      return KVFERRY_ERROR(kAlreadyExists, "{}: another process listens there", name);
    }
    return KVFERRY_ERRNO("bind {}", name);
  }
  constexpr int kBacklog = 128;
  if (::listen(fd.get(), kBacklog) != 0) return KVFERRY_ERRNO("listen on {}", name);
  return fd;
}

}  // namespace

Status check_kv_endpoint(std::string_view endpoint, bool listens) {
  if (endpoint.starts_with(kIpcScheme)) {
    const std::string_view path = endpoint.substr(kIpcScheme.size());
    if (path.starts_with('/')) {
      const auto address = make_socket_address(path);
      return address ? ok() : Status(address.error());
    }
  } else if (endpoint.starts_with(kTcpScheme)) {
    const auto place = split_host_and_port(endpoint.substr(kTcpScheme.size()));
    if (place && (!listens || PortAddress::make(*place))) return ok();
  }
  return KVFERRY_ERROR(kInvalidArgument,
                       "'{}' is no endpoint: give ipc:///PATH or tcp://HOST:PORT{}", endpoint,
                       listens ? ", with HOST an address of this machine in numbers" : "");
}

EventSocket::EventSocket(zmq::socket_type type, int most_queued)
    : context_(make_event_context()), socket_(context_, type), fd_(socket_.get(zmq::sockopt::fd)) {
  socket_.set(zmq::sockopt::linger, 0);
  socket_.set(zmq::sockopt::sndhwm, most_queued);
  socket_.set(zmq::sockopt::rcvhwm, most_queued);
}

EventSocket::EventSocket(zmq::socket_type type, const std::string& endpoint, int most_queued)
    : EventSocket(type, most_queued) {
  if (Status good = check_kv_endpoint(endpoint, /*listens=*/true); !good) {
    throw Exception(std::move(good).error());
  }
  endpoint_ = endpoint;
  try {
    socket_.set(zmq::sockopt::maxmsgsize, kMostRequestBytes);
    if (type == zmq::socket_type::router) {
      socket_.set(zmq::sockopt::router_mandatory, true);
      socket_.set(zmq::sockopt::router_handover, true);
    }
    if (endpoint.starts_with(kIpcScheme)) {
      listen_on_path(endpoint.substr(kIpcScheme.size()));
    } else {
      listen_on_port(std::string_view(endpoint).substr(kTcpScheme.size()));
    }
  } catch (const zmq::error_t& error) {
    throw event_socket_exception(error, endpoint);
  }
}

// ZeroMQ's own bind would take the path from a living process.
void EventSocket::listen_on_path(const std::string& path) {
  auto lock = NameLock::acquire(path);
  if (!lock) throw Exception(std::move(lock).error());
  lock_.emplace(std::move(lock).value());
  auto listening = ipc::listen_on_path(path, SOCK_STREAM);
  if (!listening) throw Exception(std::move(listening).error());
  const uid_t self = ::geteuid();
  if (zmq_setsockopt(socket_.handle(), ZMQ_IPC_FILTER_UID, &self, sizeof(self)) != 0) {
    throw zmq::error_t();
  }
  serve(std::move(listening).value());
}

// Made here and not by ZeroMQ, so that floods of connections do not end the process.
void EventSocket::listen_on_port(std::string_view host_and_port) {
  const auto place = split_host_and_port(host_and_port);
  auto address = place ? PortAddress::make(*place) : std::nullopt;
  KVFERRY_CHECK(address.has_value(), "an endpoint that was checked");
  auto listening = listen_on_tcp(*address, endpoint_);
  if (!listening) throw Exception(std::move(listening).error());
  if (::getsockname(listening->get(), address->get(), &address->size) != 0) {
    throw Exception(KVFERRY_ERRNO("getsockname of {}", endpoint_));
  }
  endpoint_ = endpoint_.substr(0, endpoint_.rfind(':') + 1) + std::to_string(address->port());
  serve(std::move(listening).value());
}

void EventSocket::serve(UniqueFd listening) {
  guard_ = std::make_unique<GuardedAccept>(listening.get());
  socket_.set(zmq::sockopt::use_fd, listening.get());
  socket_.bind(endpoint_);
  (void)listening.release();
}

EventSocket EventSocket::connect(zmq::socket_type type,
                                 const std::string& endpoint,
                                 int most_queued) {
  if (Status good = check_kv_endpoint(endpoint, /*listens=*/false); !good) {
    throw Exception(std::move(good).error());
  }
  constexpr int kReconnectFirstMs = 20;
  constexpr int kReconnectMostMs = 1000;
  try {
    EventSocket socket(type, most_queued);
    socket.endpoint_ = endpoint;
    socket.socket_.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(kMaxWireBytes));
    socket.socket_.set(zmq::sockopt::reconnect_ivl, kReconnectFirstMs);
    socket.socket_.set(zmq::sockopt::reconnect_ivl_max, kReconnectMostMs);
    // Not for names: of one with two addresses it would take that of the other family.
    if (endpoint.find('[') != std::string::npos) socket.socket_.set(zmq::sockopt::ipv6, true);
    if (type == zmq::socket_type::sub) socket.socket_.set(zmq::sockopt::subscribe, "");
    socket.watch_connection();
    socket.socket_.connect(endpoint);
    return socket;
  } catch (const zmq::error_t& error) {
    throw event_socket_exception(error, endpoint);
  }
}

void EventSocket::watch_connection() {
  constexpr const char* kMonitor = "inproc://connection";
  constexpr int kEvents = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED;
  if (zmq_socket_monitor(socket_.handle(), kMonitor, kEvents) != 0) throw zmq::error_t();
  monitor_.emplace(context_, zmq::socket_type::pair);
  monitor_->set(zmq::sockopt::linger, 0);
  monitor_->connect(kMonitor);
}

bool EventSocket::is_connected() noexcept {
  if (!monitor_) return false;
  while (true) {
    zmq::message_t part;
    if (zmq_msg_recv(part.handle(), monitor_->handle(), ZMQ_DONTWAIT) < 0) {
      if (zmq_errno() == EINTR) continue;
      return connected_;
    }
    // The number of the event, and what belongs to it; the second part is the endpoint.
    std::uint16_t event = 0;
    if (!part.more() || part.size() < sizeof(event)) continue;
    std::memcpy(&event, part.data(), sizeof(event));
    connected_ = event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED;
  }
}

bool EventSocket::readable() noexcept {
  int events = 0;
  std::size_t size = sizeof(events);
  int result = -1;
  do {
    result = zmq_getsockopt(socket_.handle(), ZMQ_EVENTS, &events, &size);
  } while (result != 0 && zmq_errno() == EINTR);
  return result == 0 && (events & ZMQ_POLLIN) != 0;
}

std::optional<std::vector<Bytes>> EventSocket::try_receive() noexcept {
  constexpr std::size_t kMostParts = 8;
  std::vector<Bytes> parts;
  for (bool more = true; more;) {
    zmq::message_t part;
    int result = -1;
    do {
      result = zmq_msg_recv(part.handle(), socket_.handle(), ZMQ_DONTWAIT);
    } while (result < 0 && zmq_errno() == EINTR);
    if (result < 0) return std::nullopt;
    more = part.more();  // parts of one message arrive together
    const auto* data = static_cast<const std::uint8_t*>(part.data());
    if (parts.size() < kMostParts) parts.emplace_back(data, data + part.size());
  }
  MessageOrder::after_receive();
  return parts;
}

int EventSocket::send_part(Part part, bool more) noexcept {
  const int flags = more ? ZMQ_SNDMORE : 0;
  int result = -1;
  do {
    result = zmq_send(socket_.handle(), part.data(), part.size(), flags | ZMQ_DONTWAIT);
  } while (result < 0 && zmq_errno() == EINTR);
  return result < 0 ? zmq_errno() : 0;
}

int EventSocket::send(std::initializer_list<Part> parts) noexcept {
  MessageOrder::before_send();
  std::size_t left = parts.size();
  for (const Part part : parts) {
    if (const int error = send_part(part, --left > 0); error != 0) return error;
  }
  return 0;
}

// A PUB drops in silence what a subscriber's full queue does not take. For the first part it is
// told to refuse instead: that says that a queue is full, and then the others get it all the same.
bool EventSocket::publish(std::initializer_list<Part> parts) noexcept {
  MessageOrder::before_send();
  const auto set_refuses = [this](int refuses) {
    (void)zmq_setsockopt(socket_.handle(), ZMQ_XPUB_NODROP, &refuses, sizeof(refuses));
  };
  const Part& first = *parts.begin();
  set_refuses(1);
  const bool all = send_part(first, parts.size() > 1) == 0;
  set_refuses(0);
  if (!all) (void)send_part(first, parts.size() > 1);
  std::size_t left = parts.size() - 1;
  for (const Part* part = parts.begin() + 1; part != parts.end(); ++part) {
    (void)send_part(*part, --left > 0);
  }
  return all;
}

}  // namespace kvferry::ipc
