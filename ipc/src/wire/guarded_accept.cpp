// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/guarded_accept.hpp"

#include "kvferry/ipc/os/descriptors.hpp"

#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace kvferry::ipc {
namespace {

constexpr int kNobody = -1;
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): as is accept4()
std::atomic<int> guarded{kNobody};

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
  if (accepted < 0 && errno == EMFILE) {
    // The limit was lowered meanwhile. Not again at once: who waits at the socket goes on waiting.
    constexpr int kPauseMs = 10;
    // wait-brief: a pause of ZeroMQ's thread; kPauseMs
    (void)::poll(nullptr, 0, kPauseMs);
  } else if (accepted < 0 || !is_reserved(accepted)) {
    return accepted;
  } else {
    ::close(accepted);
  }
  errno = ECONNABORTED;
  return -1;
}

int accept_anywhere(int fd, sockaddr* address, socklen_t* length, int flags) noexcept {
  return fd == guarded ? accept_guarded(fd, address, length, flags)
                       : next_accept()(fd, address, length, flags);
}

}  // namespace

GuardedAccept::GuardedAccept(int listening_fd) noexcept { guarded = listening_fd; }

GuardedAccept::~GuardedAccept() { guarded = kNobody; }

}  // namespace kvferry::ipc

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): libc's are reserved names
extern "C" __attribute__((visibility("default"))) int accept4(int fd,
                                                              sockaddr* address,
                                                              socklen_t* length,
                                                              int flags) {
  return kvferry::ipc::accept_anywhere(fd, address, length, flags);
}
