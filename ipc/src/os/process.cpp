// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/process.hpp"

#include "os/syscall.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <string_view>

namespace kvferry::ipc {
namespace {

#ifdef SO_PEERPIDFD
constexpr int kPeerPidfdOption = SO_PEERPIDFD;
#else
constexpr int kPeerPidfdOption = 77;  // Linux 6.5; absent from older C library headers.
#endif

struct ProcessStat {
  char state = '?';
  std::uint64_t start_time = 0;
};

// Fields 3 and 22 of /proc/PID/stat. The command in field 2 may hold blanks and brackets, so fields
// are counted from the last closing bracket.
Result<ProcessStat> read_stat(pid_t pid) {
  const std::string path = fmt::format("/proc/{}/stat", pid);
  const UniqueFd fd(retry_interrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); }));
  if (!fd.valid()) {
    if (errno == ENOENT) return KVFERRY_ERROR(kPeerDied, "process {} is gone", pid);
    return KVFERRY_ERRNO("open {}", path);
  }
  std::array<char, 1024> buffer{};
  // wait-brief: a file of /proc; the kernel writes it at once
  const ssize_t size =
      retry_interrupted([&] { return ::read(fd.get(), buffer.data(), buffer.size()); });
  if (size < 0) {
    if (errno == ESRCH) return KVFERRY_ERROR(kPeerDied, "process {} is gone", pid);
    return KVFERRY_ERRNO("read {}", path);
  }
  std::string_view text(buffer.data(), static_cast<std::size_t>(size));
  const std::size_t bracket = text.rfind(')');
  if (bracket == std::string_view::npos) {
    return KVFERRY_ERROR(kSystem, "{} has no command field: \"{}\"", path, text);
  }
  text.remove_prefix(bracket + 1);
  ProcessStat stat;
  constexpr std::size_t kStateAt = 1;  // after a blank
  if (text.size() > kStateAt) stat.state = text[kStateAt];
  constexpr int kFieldsFromBracket = 20;  // state is field 3, the start time field 22
  for (int field = 0; field < kFieldsFromBracket; ++field) {
    const std::size_t blank = text.find(' ');
    if (blank == std::string_view::npos) {
      return KVFERRY_ERROR(kSystem, "{} has only {} fields, expected 22", path, field + 2);
    }
    text.remove_prefix(blank + 1);
  }
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), stat.start_time);
  if (parsed.ec != std::errc{}) {
    return KVFERRY_ERROR(kSystem, "{}: field 22 is no number", path);
  }
  return stat;
}

Result<std::uint64_t> read_start_time(pid_t pid) {
  KVFERRY_ASSIGN(const ProcessStat stat, read_stat(pid));
  return stat.start_time;
}

Result<UniqueFd> open_pidfd(pid_t pid) {
  // By number: the C library's <sys/pidfd.h> of Debian 12 is unusable from C++. Always
  // close-on-exec.
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0U)));
  if (fd.valid()) return fd;
  if (errno == ESRCH) return KVFERRY_ERROR(kPeerDied, "process {} is gone", pid);
  return KVFERRY_ERRNO("pidfd_open of process {}", pid);
}

bool is_dead(int pidfd) noexcept { return poll_now(pidfd, POLLIN) > 0; }

struct Identified {
  UniqueFd pidfd;
  std::uint64_t start_time = 0;
};

// The start time is read on both sides of pidfd_open: equal values mean that one process had the
// pid all along, and a living pidfd that it is the one the descriptor names.
Result<Identified> identify(pid_t pid) {
  KVFERRY_ASSIGN(const std::uint64_t before, read_start_time(pid));
  KVFERRY_ASSIGN(UniqueFd pidfd, open_pidfd(pid));
  KVFERRY_ASSIGN(const std::uint64_t after, read_start_time(pid));
  if (before != after) {
    return KVFERRY_ERROR(kPeerDied, "process {} (started at {}) is gone, its pid was reused", pid,
                         before);
  }
  return Identified{std::move(pidfd), after};
}

}  // namespace

Status check_own_proc() {
  std::array<char, 32> target{};
  const ssize_t size = ::readlink("/proc/self", target.data(), target.size());
  if (size < 0) return KVFERRY_ERRNO("readlink /proc/self; is /proc mounted?");
  const std::string_view shown(target.data(), static_cast<std::size_t>(size));
  if (shown == std::to_string(::getpid())) return ok();
  return KVFERRY_ERROR(kPermission,
                       "/proc belongs to another pid namespace: this is process {}, which it shows "
                       "as {}; mount a /proc of this one (unshare --mount-proc)",
                       ::getpid(), shown);
}

Result<ProcessRef> ProcessRef::of_peer(int socket_fd) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return KVFERRY_ERRNO("peer credentials of socket {}", socket_fd);
  }
  if (credentials.pid <= 0) {
    return KVFERRY_ERROR(kPermission,
                         "the peer of socket {} is in another pid namespace; run both processes "
                         "in one (--pid=container:NAME or --pid=host)",
                         socket_fd);
  }

  ProcessRef peer;
  peer.pid_ = credentials.pid;
  if (environment("KVFERRY_FORCE_PIDFD_FALLBACK") != "1") {
    int raw = -1;
    size = sizeof(raw);
    if (::getsockopt(socket_fd, SOL_SOCKET, kPeerPidfdOption, &raw, &size) == 0) {
      peer.pidfd_ = UniqueFd(raw);
      auto start_time = read_start_time(peer.pid_);
      // Alive after the read: the pid was the peer's own while /proc was read.
      if (is_dead(raw)) {
        return KVFERRY_ERROR(kPeerDied, "peer process {} of socket {} is dead", peer.pid_,
                             socket_fd);
      }
      // That it could not be read, for lack of a descriptor say, is no death.
      if (!start_time) return std::move(start_time).error();
      peer.start_time_ = *start_time;
      return peer;
    }
    if (errno == ESRCH || errno == ENODATA) {
      return KVFERRY_ERROR(kPeerDied, "peer process {} of socket {} is dead", peer.pid_, socket_fd);
    }
    if (errno != ENOPROTOOPT && errno != EOPNOTSUPP && errno != EINVAL) {
      return KVFERRY_ERRNO("SO_PEERPIDFD of socket {}", socket_fd);
    }
  }

  KVFERRY_ASSIGN(Identified found, identify(peer.pid_));
  // The kernel closes a dead process's sockets before its pid can be reused: a socket that is still
  // open proves that the pid was the peer's when it was looked up.
  const int events = poll_now(socket_fd, POLLRDHUP);
  if (events != 0) {
    return KVFERRY_ERROR(kPeerDied, "peer process {} closed socket {} before it was identified",
                         peer.pid_, socket_fd);
  }
  peer.pidfd_ = std::move(found.pidfd);
  peer.start_time_ = found.start_time;
  return peer;
}

Result<ProcessRef> ProcessRef::of_pid(pid_t pid) {
  if (pid <= 0) return KVFERRY_ERROR(kInvalidArgument, "{} is no process id", pid);
  KVFERRY_ASSIGN(Identified found, identify(pid));
  ProcessRef process;
  process.pid_ = pid;
  process.pidfd_ = std::move(found.pidfd);
  process.start_time_ = found.start_time;
  return process;
}

bool ProcessRef::has_died() const noexcept { return valid() && is_dead(pidfd_.get()); }

bool ProcessRef::wait_death(Deadline deadline) const noexcept {
  // wait: the death of a process; deadline, of the caller; its pidfd
  return valid() && poll_until(pidfd_.get(), POLLIN, deadline) > 0;
}

bool ProcessRef::is_stopped() const {
  if (!valid()) return false;
  const auto stat = read_stat(pid_);
  return stat && stat->start_time == start_time_ && (stat->state == 'T' || stat->state == 't');
}

Status ProcessRef::signal(int signal_number) const {
  KVFERRY_CHECK(valid(), "signal to an empty ProcessRef");
  if (::syscall(SYS_pidfd_send_signal, pidfd_.get(), signal_number, nullptr, 0U) == 0) return ok();
  if (errno == ESRCH) return KVFERRY_ERROR(kPeerDied, "process {} is dead", pid_);
  return KVFERRY_ERRNO("signal {} to process {}", signal_number, pid_);
}

std::string environment(const char* name) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nobody calls setenv once there are threads
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

}  // namespace kvferry::ipc
