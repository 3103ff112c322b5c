// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace kvferry::ipc {

/// Keeps floods of connections from ending the process that listens there. ZeroMQ accepts whoever
/// comes, and aborts when there is no descriptor or memory for one: EMFILE, ENOBUFS and ENOMEM are
/// not among the errors that its ipc_listener.cpp knows (libzmq 4.3.4), and no option bounds its
/// connections. So accept4() of every program that this library is linked into is ours: for the
/// sockets that are guarded it closes at once what would take one of the last kReservedDescriptors,
/// and for all others it is libc's. @threading any.
class GuardedAccept {
 public:
  /// At most 64 live at a time in a process; one more guards nothing, and says so.
  explicit GuardedAccept(int listening_fd);
  GuardedAccept(const GuardedAccept&) = delete;
  GuardedAccept& operator=(const GuardedAccept&) = delete;
  ~GuardedAccept();

 private:
  std::size_t place_ = 0;
};

}  // namespace kvferry::ipc
