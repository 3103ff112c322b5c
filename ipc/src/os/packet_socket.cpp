// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/packet_socket.hpp"

#include "base/message_order.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "os/socket_address.hpp"
#include "os/syscall.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kControlBytes = CMSG_SPACE(sizeof(int) * PacketSocket::kMaxFds);

// Room for one whole packet even where the system's default is smaller; the kernel may cap it.
void widen_send_buffer(int fd) noexcept {
  const int bytes = static_cast<int>(2 * PacketSocket::kMaxPacketBytes);
  (void)::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
}

Status set_send_timeout(int fd, Deadline deadline) {
  // Zero would mean "for ever".
  const auto left =
      std::max(std::chrono::duration_cast<std::chrono::microseconds>(deadline.remaining()),
               std::chrono::microseconds(1000));
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
  timeval timeout{};
  timeout.tv_sec = seconds.count();
  timeout.tv_usec = static_cast<suseconds_t>((left - seconds).count());
  if (::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout)) != 0) {
    return KVFERRY_ERRNO("SO_SNDTIMEO");
  }
  return ok();
}

// Takes every descriptor out of the message first: whatever is wrong with it, none may leak.
std::vector<UniqueFd> take_fds(msghdr& message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

Result<PacketSocket> PacketSocket::connect(const std::filesystem::path& path, Deadline deadline) {
  KVFERRY_ASSIGN(const sockaddr_un address, make_socket_address(path));
  // Blocking for the connect alone: a full backlog gives a non-blocking one nothing to poll for.
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return KVFERRY_ERRNO("socket for {}", path.native());
  for (;;) {
    KVFERRY_TRY(set_send_timeout(fd.get(), deadline));
    // wait: room in a listener's backlog; deadline, of the caller, by SO_SNDTIMEO; the end of the
    // listener
    if (::connect(fd.get(), as_sockaddr(address), sizeof(address)) == 0) break;
    switch (errno) {
      case EINTR:
        if (!deadline.expired()) continue;
        [[fallthrough]];
      case EAGAIN:
        return KVFERRY_ERROR(kTimeout, "{} did not accept a connection in time", path.native());
      case ENOENT:
      case ENOTDIR:
      case ECONNREFUSED: return KVFERRY_ERROR(kNotFound, "nothing listens on {}", path.native());
      case EPROTOTYPE:
        return KVFERRY_ERROR(kProtocol, "{} is a socket of another type", path.native());
      default: return KVFERRY_ERRNO("connect to {}", path.native());
    }
  }
  const int flags = ::fcntl(fd.get(), F_GETFL);
  if (flags < 0 || ::fcntl(fd.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    return KVFERRY_ERRNO("O_NONBLOCK for {}", path.native());
  }
  widen_send_buffer(fd.get());
  PacketSocket socket(std::move(fd));
  KVFERRY_TRY(socket.check_peer_uid());
  return socket;
}

Status PacketSocket::send(std::span<const std::uint8_t> bytes, std::span<const int> fds) {
  // A packet of no bytes reads like the end of the connection.
  if (bytes.empty() || bytes.size() > kMaxPacketBytes || fds.size() > kMaxFds) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "packet of {} bytes and {} descriptors; allowed are 1 to {} and 0 to {}",
                         bytes.size(), fds.size(), kMaxPacketBytes, kMaxFds);
  }
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): sendmsg does not write to it.
  iovec part{const_cast<std::uint8_t*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  MessageOrder::before_send();
  const ssize_t sent = retry_interrupted(
      [&] { return ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT); });
  if (sent >= 0) return ok();
  switch (errno) {
    case EAGAIN:
    case ENOBUFS:
    case ETOOMANYREFS:
      return KVFERRY_ERROR(kBusy, "the peer of socket {} does not read: its buffer is full",
                           fd_.get());
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN:
      return KVFERRY_ERROR(kPeerDied, "the peer of socket {} closed the connection", fd_.get());
    default: return KVFERRY_ERRNO("send {} bytes on socket {}", bytes.size(), fd_.get());
  }
}

Result<std::optional<Packet>> PacketSocket::try_receive() {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init): 128 KiB that recvmsg fills.
  std::array<std::uint8_t, kMaxPacketBytes> buffer;
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control{};
  iovec part{buffer.data(), buffer.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t size = retry_interrupted(
      [&] { return ::recvmsg(fd_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC); });
  if (size < 0) {
    if (errno == EAGAIN) return std::optional<Packet>();
    if (errno == ECONNRESET || errno == ENOTCONN) {
      return KVFERRY_ERROR(kPeerDied, "the peer of socket {} closed the connection", fd_.get());
    }
    return KVFERRY_ERRNO("receive on socket {}", fd_.get());
  }
  MessageOrder::after_receive();
  Packet packet;
  packet.fds = take_fds(message);
  if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) {
    return KVFERRY_ERROR(kProtocol,
                         "cut packet on socket {}: more than {} bytes or {} descriptors, or no "
                         "descriptors left in this process (ulimit -n)",
                         fd_.get(), kMaxPacketBytes, kMaxFds);
  }
  if (size == 0) {
    return KVFERRY_ERROR(kPeerDied, "the peer of socket {} closed the connection", fd_.get());
  }
  packet.bytes.assign(buffer.begin(), buffer.begin() + size);
  return std::optional<Packet>(std::move(packet));
}

Result<Packet> PacketSocket::receive(Deadline deadline) {
  for (;;) {
    KVFERRY_ASSIGN(std::optional<Packet> packet, try_receive());
    if (packet) return std::move(*packet);
    // wait: a packet; deadline, of the caller; the end of the connection
    const int events = poll_until(fd_.get(), POLLIN, deadline);
    if (events < 0) return KVFERRY_ERRNO("poll socket {}", fd_.get());
    if (events == 0) return KVFERRY_ERROR(kTimeout, "no packet on socket {} in time", fd_.get());
  }
}

bool PacketSocket::peer_closed() const noexcept {
  pollfd entry{fd_.get(), 0, 0};
  // wait-none: looks only
  return ::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLHUP | POLLERR)) != 0;
}

pid_t PacketSocket::peer_pid() const noexcept {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  const int got = ::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size);
  return got == 0 ? credentials.pid : 0;
}

Status PacketSocket::check_peer_uid() const {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return KVFERRY_ERRNO("peer credentials of socket {}", fd_.get());
  }
  if (credentials.uid != ::geteuid()) {
    return KVFERRY_ERROR(kPermission, "peer process {} runs under uid {}, expected {}",
                         credentials.pid, credentials.uid, ::geteuid());
  }
  return ok();
}

Result<PacketListener> PacketListener::listen(const std::filesystem::path& path) {
  KVFERRY_TRY(make_socket_address(path));
  KVFERRY_ASSIGN(NameLock lock, NameLock::acquire(path));
  KVFERRY_ASSIGN(UniqueFd fd, listen_on_path(path, SOCK_SEQPACKET));
  return PacketListener(std::move(lock), std::move(fd));
}

Result<std::optional<PacketSocket>> PacketListener::try_accept() {
  for (;;) {
    // wait-none: the listener is O_NONBLOCK
    UniqueFd fd(retry_interrupted(
        [&] { return ::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); }));
    if (!fd.valid()) {
      if (errno == EAGAIN) return std::optional<PacketSocket>();
      if (errno == ECONNABORTED) continue;
      return KVFERRY_ERRNO("accept on socket {}", fd_.get());
    }
    widen_send_buffer(fd.get());
    PacketSocket socket(std::move(fd));
    if (const Status uid = socket.check_peer_uid(); !uid) {
      log_warn("connection refused: {}", uid.error().to_string());
      continue;
    }
    return std::optional<PacketSocket>(std::move(socket));
  }
}

}  // namespace kvferry::ipc
