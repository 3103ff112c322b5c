// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_lock.hpp"

#include "kvferry/ipc/base/log.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>

namespace kvferry::ipc {
namespace {

constexpr std::chrono::seconds kStuckAfter{1};

struct Address {
  sockaddr_un raw{};
  socklen_t length = 0;
};

Address address_of(std::string_view device_name) {
  const std::string name = fmt::format("kvferry-dev.{}.{}", ::geteuid(), device_name);
  Address address;
  address.raw.sun_family = AF_UNIX;
  // A leading zero byte makes the name abstract: it exists only while the socket does.
  const std::size_t length = std::min(name.size(), sizeof(address.raw.sun_path) - 1);
  std::memcpy(&address.raw.sun_path[1], name.data(), length);
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

const sockaddr* as_sockaddr(const Address& address) {
  return reinterpret_cast<const sockaddr*>(&address.raw);
}

UniqueFd open_socket() {
  return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

/// A listening socket of that name, an invalid one when somebody has it.
Result<UniqueFd> try_listen(const Address& address) {
  UniqueFd socket = open_socket();
  if (!socket.valid()) return KVFERRY_ERRNO("open a lock socket");
  if (::bind(socket.get(), as_sockaddr(address), address.length) != 0) {
    if (errno == EADDRINUSE) return UniqueFd();
    return KVFERRY_ERRNO("bind a lock socket");
  }
  if (::listen(socket.get(), SOMAXCONN) != 0) return KVFERRY_ERRNO("listen on a lock socket");
  return socket;
}

/// The holder as the kernel names it, once we are connected.
pid_t holder_of(const UniqueFd& socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  const int rc = ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length);
  return rc == 0 ? peer.pid : 0;
}

/// True once the holder is gone or may be; false at the deadline.
bool wait_holder_gone(const Address& address, Deadline deadline, pid_t& holder) {
  const UniqueFd waiter = open_socket();
  // wait-none: the socket is O_NONBLOCK
  if (!waiter.valid() || ::connect(waiter.get(), as_sockaddr(address), address.length) != 0) {
    // Gone already, not yet listening, or more waiters than a socket queues: a matter of
    // microseconds, for which there is nothing to sleep on.
    // wait-brief: a holder that has just bound or closed its socket; microseconds, and our deadline
    std::this_thread::yield();
    return !deadline.expired();
  }
  holder = holder_of(waiter);
  pollfd entry{waiter.get(), POLLIN, 0};
  // wait: the lock of the host device; deadline, of the caller (kLockPatience); the death of the
  // holder, which closes its socket
  const int ready = ::poll(&entry, 1, deadline.poll_timeout_ms());
  return ready > 0 || (ready < 0 && errno == EINTR) || !deadline.expired();
}

}  // namespace

Result<HostLock> HostLock::acquire(std::string_view device_name, Deadline deadline) {
  const Address address = address_of(device_name);
  const Deadline notice = Deadline::after(kStuckAfter).earlier(deadline);
  bool noticed = false;
  pid_t holder = 0;
  for (;;) {
    KVFERRY_ASSIGN(UniqueFd listener, try_listen(address));
    if (listener.valid()) {
      if (noticed) log_info("host device {}: got its allocation lock", device_name);
      return HostLock(std::move(listener));
    }
    if (wait_holder_gone(address, noticed ? deadline : notice, holder)) continue;
    if (deadline.expired()) {
      return KVFERRY_ERROR(kTimeout,
                           "host device {}: pid {} holds its allocation lock beyond our deadline; "
                           "look whether that process is stopped",
                           device_name, holder);
    }
    noticed = true;
    log_warn("host device {}: waiting for its allocation lock, held by pid {}", device_name,
             holder);
  }
}

}  // namespace kvferry::ipc
