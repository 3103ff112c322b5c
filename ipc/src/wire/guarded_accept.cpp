// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/guarded_accept.hpp"

#include "base/descriptor_order.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/descriptors.hpp"

#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>

namespace kvferry::ipc {
namespace {

// Descriptors of guarded sockets and one more, so that a free place is told by 0.
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): as is accept4()
std::array<std::atomic<int>, 64> guarded{};

bool is_guarded(int fd) noexcept {
  return std::any_of(guarded.begin(), guarded.end(),
                     [fd](const auto& one) { return one == fd + 1; });
}

using Accept = int (*)(int, sockaddr*, socklen_t*, int);

// Whoever is next: libc, or a sanitizer before it.
Accept next_accept() noexcept {
  static const auto kNext = reinterpret_cast<Accept>(::dlsym(RTLD_NEXT, "accept4"));
  return kNext;
}

// The lowest free number is given: one this high says that all below are taken.
bool is_reserved(int fd) noexcept {
  return static_cast<std::size_t>(fd) + kReservedDescriptors >= descriptor_limit();
}

int accept_guarded(int fd, sockaddr* address, socklen_t* length, int flags) noexcept {
  const int accepted = next_accept()(fd, address, length, flags);
  if (accepted < 0 && (errno == EMFILE || errno == ENOBUFS || errno == ENOMEM)) {
    // Not again at once: who waits at the socket goes on waiting.
    constexpr int kPauseMs = 10;
    // wait-brief: a pause of ZeroMQ's thread; kPauseMs
    (void)::poll(nullptr, 0, kPauseMs);
  } else if (accepted < 0 || !is_reserved(accepted)) {
    return accepted;
  } else {
    DescriptorOrder::before_close();
    // Past the sanitizer, as ZeroMQ's own: it would take the next one of this number for this one.
    ::syscall(SYS_close, accepted);
  }
  errno = ECONNABORTED;
  return -1;
}

int accept_anywhere(int fd, sockaddr* address, socklen_t* length, int flags) noexcept {
  const int accepted = is_guarded(fd) ? accept_guarded(fd, address, length, flags)
                                      : next_accept()(fd, address, length, flags);
  DescriptorOrder::before_close();
  return accepted;
}

}  // namespace

GuardedAccept::GuardedAccept(int listening_fd) {
  for (std::atomic<int>& one : guarded) {
    int free = 0;
    if (one.compare_exchange_strong(free, listening_fd + 1)) return;
    ++place_;
  }
  log_warn(
      "{} control sockets of this process are guarded against floods of connections, and no "
      "place is left for one more: with it, a flood may end the process",
      guarded.size());
}

GuardedAccept::~GuardedAccept() {
  if (place_ < guarded.size()) guarded.at(place_) = 0;
}

}  // namespace kvferry::ipc

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): libc's are reserved names
extern "C" __attribute__((visibility("default"))) int accept4(int fd,
                                                              sockaddr* address,
                                                              socklen_t* length,
                                                              int flags) {
  return kvferry::ipc::accept_anywhere(fd, address, length, flags);
}
