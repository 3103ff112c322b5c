// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <memory>

namespace kvferry::ipc {

/// Remembers the process that something was made in. A child that it forks has a copy of the memory
/// and shares every descriptor, and none of the threads: whatever the copy does to a socket, an
/// epoll set or a lock, it does to its parent's. So an object with threads or peers does nothing in
/// a child, not even to end itself. @threading any, also between fork and exec.
class HomeProcess {
 public:
  [[nodiscard]] bool is_here() const noexcept { return ::getpid() == pid_; }
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }

 private:
  pid_t pid_ = ::getpid();
};

/// For a destructor, first: in a child the object is not destroyed, its copy of the memory goes
/// with the child.
template <typename T>
void forget_in_child(const HomeProcess& home, std::unique_ptr<T>& object) noexcept {
  if (!home.is_here()) (void)object.release();
}

}  // namespace kvferry::ipc
