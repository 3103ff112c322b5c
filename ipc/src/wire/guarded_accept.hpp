// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvferry::ipc {

/// Keeps floods of connections from ending the process that listens there. ZeroMQ accepts whoever
/// comes, and aborts when there is no descriptor for one: EMFILE is not among the errors that its
/// ipc_listener.cpp knows (libzmq 4.3.4), and no option bounds its connections. So accept4() of
/// every program that this library is linked into is ours: it passes on to libc's, but on this
/// socket, while one of these lives, closes at once what would take one of the last
/// kReservedDescriptors. One at a time in a process: a second one takes its place, and either's end
/// leaves both unguarded. @threading any.
class GuardedAccept {
 public:
  explicit GuardedAccept(int listening_fd) noexcept;
  GuardedAccept(const GuardedAccept&) = delete;
  GuardedAccept& operator=(const GuardedAccept&) = delete;
  ~GuardedAccept();
};

}  // namespace kvferry::ipc
