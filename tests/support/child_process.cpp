// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "support/child_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ostream>
#include <utility>

namespace kvferry::test {
namespace {

using ipc::UniqueFd;

[[noreturn]] void throw_errno(int error, std::string_view what) {
  errno = error;
  throw ipc::Exception(KVFERRY_ERRNO("{}", what));
}

/// posix_spawn's two objects, destroyed whatever throws.
class SpawnPlan {
 public:
  SpawnPlan() {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawnattr_init(&attributes_);
    sigset_t set;
    sigemptyset(&set);
    ::posix_spawnattr_setsigmask(&attributes_, &set);
    sigfillset(&set);
    ::posix_spawnattr_setsigdefault(&attributes_, &set);
    ::posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;
  ~SpawnPlan() {
    ::posix_spawnattr_destroy(&attributes_);
    ::posix_spawn_file_actions_destroy(&actions_);
  }

  /// fd becomes target in the child. Goes through a copy above all targets, so that no earlier
  /// dup2 of the plan can overwrite it.
  void map_fd(int fd, int target) {
    const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 200);
    if (copy < 0) throw_errno(errno, "copy a descriptor for a child");
    copies_.emplace_back(copy);
    ::posix_spawn_file_actions_adddup2(&actions_, copy, target);
  }

  pid_t spawn(const std::string& program,
              std::vector<std::string> arguments,
              std::vector<std::string> environment,
              int first_closed_fd) {
    ::posix_spawn_file_actions_addclosefrom_np(&actions_, first_closed_fd);
    arguments.insert(arguments.begin(), program);
    std::vector<char*> argv = pointers(arguments);
    std::vector<char*> envp = pointers(environment);
    pid_t pid = -1;
    const int error =
        ::posix_spawn(&pid, program.c_str(), &actions_, &attributes_, argv.data(), envp.data());
    if (error != 0) throw_errno(error, "start child " + program);
    return pid;
  }

 private:
  static std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> out;
    out.reserve(texts.size() + 1);
    for (std::string& text : texts) out.push_back(text.data());
    out.push_back(nullptr);
    return out;
  }

  posix_spawn_file_actions_t actions_{};
  posix_spawnattr_t attributes_{};
  std::vector<UniqueFd> copies_;
};

/// Ours with the given entries replacing those of the same name.
std::vector<std::string> merged_environment(std::vector<std::string> extra) {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string_view key = text.substr(0, text.find('=') + 1);
    bool replaced = false;
    for (const std::string& own : extra) replaced = replaced || own.starts_with(key);
    if (!replaced) extra.emplace_back(text);
  }
  return extra;
}

bool poll_one(pollfd* entries, nfds_t count, ipc::Deadline deadline) {
  for (;;) {
    const int ready = ::poll(entries, count, deadline.poll_timeout_ms());
    if (ready > 0) return true;
    if (ready == 0 && deadline.expired()) return false;
    if (ready < 0 && errno != EINTR) return false;
  }
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const ChildExit& exit) {
  return exit.by_signal ? out << "killed by signal " << exit.code
                        : out << "exited with " << exit.code;
}

ChildProcess::ChildProcess(ChildOptions options) {
  std::array<int, 2> in{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, in.data()) != 0) {
    throw_errno(errno, "make a child's stdin");
  }
  stdin_ = UniqueFd(in[0]);
  const UniqueFd child_stdin(in[1]);
  std::array<int, 2> out{};
  if (::pipe2(out.data(), O_CLOEXEC) != 0) throw_errno(errno, "make a child's stdout");
  stdout_ = UniqueFd(out[0]);
  const UniqueFd child_stdout(out[1]);
  ::fcntl(stdout_.get(), F_SETFL, O_NONBLOCK);

  SpawnPlan plan;
  plan.map_fd(child_stdin.get(), STDIN_FILENO);
  plan.map_fd(child_stdout.get(), STDOUT_FILENO);
  if (options.capture_stderr) {
    stderr_ = UniqueFd(::memfd_create("kvferry-test-stderr", MFD_CLOEXEC));
    if (!stderr_.valid()) throw_errno(errno, "make a child's stderr");
    plan.map_fd(stderr_.get(), STDERR_FILENO);
  }
  int next = STDERR_FILENO + 1;
  for (const int fd : options.pass_fds) plan.map_fd(fd, next++);
  pid_ = plan.spawn(options.program, std::move(options.arguments),
                    merged_environment(std::move(options.environment)), next);
  // Nobody else reaps our child, so its pid cannot be reused before this.
  pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  if (!pidfd_.valid()) {
    const int error = errno;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    throw_errno(error, "open a pidfd of child " + options.program);
  }
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      exit_(std::move(other.exit_)),
      pidfd_(std::move(other.pidfd_)),
      stdin_(std::move(other.stdin_)),
      stdout_(std::move(other.stdout_)),
      stderr_(std::move(other.stderr_)),
      unread_(std::move(other.unread_)),
      stdout_ended_(other.stdout_ended_) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this == &other) return *this;
  end();
  pid_ = std::exchange(other.pid_, -1);
  exit_ = std::move(other.exit_);
  pidfd_ = std::move(other.pidfd_);
  stdin_ = std::move(other.stdin_);
  stdout_ = std::move(other.stdout_);
  stderr_ = std::move(other.stderr_);
  unread_ = std::move(other.unread_);
  stdout_ended_ = other.stdout_ended_;
  return *this;
}

ChildProcess::~ChildProcess() { end(); }

void ChildProcess::end() noexcept {
  if (!pidfd_.valid() || exit_.has_value()) return;
  kill();
  siginfo_t info{};
  while (::waitid(P_PIDFD, static_cast<id_t>(pidfd_.get()), &info, WEXITED) != 0 &&
         errno == EINTR) {
  }
  pidfd_.reset();
}

void ChildProcess::read_available() noexcept {
  std::array<char, 4096> chunk{};
  for (;;) {
    const ssize_t count = ::read(stdout_.get(), chunk.data(), chunk.size());
    if (count > 0) {
      unread_.append(chunk.data(), static_cast<std::size_t>(count));
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count == 0 || errno != EAGAIN) stdout_ended_ = true;
    return;
  }
}

std::optional<std::string> ChildProcess::read_line(ipc::Deadline deadline) {
  for (;;) {
    const std::size_t end = unread_.find('\n');
    if (end != std::string::npos) {
      std::string line = unread_.substr(0, end);
      unread_.erase(0, end + 1);
      return line;
    }
    if (stdout_ended_) return std::nullopt;
    std::array<pollfd, 2> entries = {pollfd{stdout_.get(), POLLIN, 0},
                                     pollfd{pidfd_.get(), POLLIN, 0}};
    if (!poll_one(entries.data(), entries.size(), deadline)) return std::nullopt;
    const bool died = entries[1].revents != 0;
    read_available();
    // Its grandchildren may hold the pipe open: what a dead child has not written never comes.
    if (died) stdout_ended_ = true;
  }
}

bool ChildProcess::wait_line(std::string_view text, ipc::Deadline deadline) {
  while (const auto line = read_line(deadline)) {
    if (*line == text) return true;
  }
  return false;
}

bool ChildProcess::write_line(std::string_view text) {
  std::string line(text);
  line += '\n';
  std::string_view rest = line;
  while (!rest.empty()) {
    const ssize_t count = ::send(stdin_.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    rest.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

void ChildProcess::signal(int signal_number) noexcept {
  if (exit_.has_value() || !pidfd_.valid()) return;
  ::syscall(SYS_pidfd_send_signal, pidfd_.get(), signal_number, nullptr, 0);
}

bool ChildProcess::stop() noexcept {
  signal(SIGSTOP);
  siginfo_t info{};
  const auto id = static_cast<id_t>(pid_);
  // Looks without taking, so that a death stays there for wait().
  if (::waitid(P_PID, id, &info, WSTOPPED | WEXITED | WNOWAIT) != 0) return false;
  if (info.si_code != CLD_STOPPED) return false;
  return ::waitid(P_PID, id, &info, WSTOPPED | WNOHANG) == 0;
}

bool ChildProcess::has_stopped() const noexcept {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WNOHANG | WNOWAIT) == 0 &&
         info.si_code == CLD_STOPPED;
}

bool ChildProcess::wait_zombie(ipc::Deadline deadline) const noexcept {
  if (exit_.has_value()) return true;
  pollfd entry{pidfd_.get(), POLLIN, 0};
  return poll_one(&entry, 1, deadline);
}

std::optional<ChildExit> ChildProcess::wait(ipc::Deadline deadline) {
  while (!exit_.has_value()) {
    // Reading meanwhile lets a child end that is blocked on a full stdout.
    std::array<pollfd, 2> entries = {pollfd{pidfd_.get(), POLLIN, 0},
                                     pollfd{stdout_ended_ ? -1 : stdout_.get(), POLLIN, 0}};
    if (!poll_one(entries.data(), entries.size(), deadline)) return std::nullopt;
    if (!stdout_ended_) read_available();
    if (entries[0].revents == 0) continue;
    siginfo_t info{};
    if (::waitid(P_PIDFD, static_cast<id_t>(pidfd_.get()), &info, WEXITED) != 0) {
      if (errno == EINTR) continue;
      throw_errno(errno, "reap a child");
    }
    exit_ = ChildExit{info.si_code != CLD_EXITED, info.si_status};
  }
  return exit_;
}

std::string ChildProcess::stderr_text() const {
  std::string text;
  std::array<char, 4096> chunk{};
  while (stderr_.valid()) {
    const ssize_t count =
        ::pread(stderr_.get(), chunk.data(), chunk.size(), static_cast<off_t>(text.size()));
    if (count <= 0) break;
    text.append(chunk.data(), static_cast<std::size_t>(count));
  }
  return text;
}

std::string sibling_program(std::string_view name) {
  std::array<char, 4096> path{};
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  if (length <= 0) throw_errno(errno, "read /proc/self/exe");
  std::string self(path.data(), static_cast<std::size_t>(length));
  self.resize(self.rfind('/') + 1);
  self += name;
  return self;
}

}  // namespace kvferry::test
