// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvferry::ipc {

/// Keeps floods of connections from ending the process that listens there. ZeroMQ accepts whoever
/// comes, and aborts when there is no descriptor for one: EMFILE is not among the errors that its
/// ipc_listener.cpp knows (libzmq 4.3.4), and no option bounds its connections. So accept4() of a
/// process that links this file is ours, and while one of these lives, it closes at once what would
/// take one of the last kReservedDescriptors on this socket. On all others it is libc's.
/// One at a time in a process. @threading any.
class GuardedAccept {
 public:
  explicit GuardedAccept(int listening_fd) noexcept;
  GuardedAccept(const GuardedAccept&) = delete;
  GuardedAccept& operator=(const GuardedAccept&) = delete;
  ~GuardedAccept();
};

}  // namespace kvferry::ipc
