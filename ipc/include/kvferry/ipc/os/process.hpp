// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <type_traits>

namespace kvferry::ipc {

/// kPermission when /proc shows another pid namespace than this process's: every look at a peer
/// would be one at a stranger.
[[nodiscard]] Status check_own_proc();

/// One life of one process: a pidfd with pid and start time. Death is read from the kernel alone
/// (the pidfd becomes readable), never from heartbeats, closed sockets or kill(pid, 0).
/// @threading any.
class ProcessRef {
 public:
  ProcessRef() = default;

  /// The process at the other end of a connected Unix socket. Uses SO_PEERPIDFD where the kernel
  /// has it (6.5 on), else pidfd_open of the SO_PEERCRED pid, confirmed by start time and by the
  /// socket still being open. KVFERRY_FORCE_PIDFD_FALLBACK=1 in the environment forces the latter.
  [[nodiscard]] static Result<ProcessRef> of_peer(int socket_fd);
  [[nodiscard]] static Result<ProcessRef> of_pid(pid_t pid);

  [[nodiscard]] bool valid() const noexcept { return pidfd_.valid(); }
  /// For poll(2): readable once the process is dead.
  [[nodiscard]] int pidfd() const noexcept { return pidfd_.get(); }
  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  /// Field 22 of /proc/PID/stat; tells a reused pid apart.
  [[nodiscard]] std::uint64_t start_time() const noexcept { return start_time_; }
  [[nodiscard]] bool has_died() const noexcept;
  /// True when it died before the deadline.
  [[nodiscard]] bool wait_death(Deadline deadline) const noexcept;
  /// Stopped by a signal or a debugger: it does nothing until it is continued, and that is no fault
  /// of whoever waits for it. False when that cannot be told.
  [[nodiscard]] bool is_stopped() const;
  /// pidfd_send_signal: never hits a process that reused the pid.
  [[nodiscard]] Status signal(int signal_number) const;

 private:
  UniqueFd pidfd_;
  pid_t pid_ = 0;
  std::uint64_t start_time_ = 0;
};

static_assert(std::is_nothrow_move_constructible_v<ProcessRef>);

/// Environment variable or nothing: the one place that calls getenv.
[[nodiscard]] std::string environment(const char* name);

}  // namespace kvferry::ipc
