// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run/child.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <deque>
#include <fstream>
#include <string_view>

namespace kvferry::cli {
namespace {

// It has ended, or is about to: but a tracer of it may keep its end back for a moment.
constexpr std::chrono::milliseconds kReapTime{2000};
// There is nothing to wait on for that.
constexpr std::chrono::milliseconds kReapLook{5};

/// posix_spawn's two option blocks, destroyed on every path.
class SpawnSetup {
 public:
  SpawnSetup() {
    posix_spawn_file_actions_init(&actions_);
    posix_spawnattr_init(&attributes_);
  }
  SpawnSetup(const SpawnSetup&) = delete;
  SpawnSetup& operator=(const SpawnSetup&) = delete;
  ~SpawnSetup() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }

  void prepare(const ChildStart& start) {
    posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions_, STDOUT_FILENO, start.log_file.c_str(),
                                     O_WRONLY | O_CREAT | O_APPEND, 0600);
    posix_spawn_file_actions_adddup2(&actions_, STDOUT_FILENO, STDERR_FILENO);
    if (start.inherited_fd >= 0) {
      posix_spawn_file_actions_adddup2(&actions_, start.inherited_fd, kInheritedFd);
    }
    sigset_t none;
    sigemptyset(&none);
    sigset_t changed;
    sigemptyset(&changed);
    for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) sigaddset(&changed, number);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &changed);
    posix_spawnattr_setpgroup(&attributes_, 0);
    posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  }

  [[nodiscard]] const posix_spawn_file_actions_t* actions() const { return &actions_; }
  [[nodiscard]] const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_{};
  posix_spawnattr_t attributes_{};
};

/// Ours, less the configuration file: its options have been applied and are passed on by name. The
/// first of a name counts.
std::vector<char*> child_environment(std::vector<std::string>& added) {
  std::vector<char*> variables;
  variables.reserve(added.size());
  for (std::string& variable : added) variables.push_back(variable.data());
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (!std::string_view(*variable).starts_with("KVFERRY_CONFIG=")) variables.push_back(*variable);
  }
  variables.push_back(nullptr);
  return variables;
}

}  // namespace

ipc::Result<ipc::ProcessRef> start_child(const ChildStart& start) {
  SpawnSetup setup;
  setup.prepare(start);
  std::vector<std::string> arguments = start.arguments;
  arguments.insert(arguments.begin(), "kvferry");
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::vector<std::string> added = start.environment;
  std::vector<char*> variables = child_environment(added);
  pid_t pid = 0;
  errno = posix_spawn(&pid, start.program.c_str(), setup.actions(), setup.attributes(), argv.data(),
                      variables.data());
  if (errno != 0) {
    return KVFERRY_ERRNO("cannot start {} (log {})", start.program.string(),
                         start.log_file.string());
  }
  auto process = ipc::ProcessRef::of_pid(pid);
  if (!process) {
    // Nobody could ever tell its end: it must not run.
    kill(pid, SIGKILL);
    (void)reap_child(pid);
  }
  return process;
}

ChildEnd reap_child(pid_t pid) {
  const ipc::Deadline deadline = ipc::Deadline::after(kReapTime);
  int status = 0;
  for (;;) {
    const pid_t reaped = waitpid(pid, &status, WNOHANG);
    if (reaped == pid) break;
    if (reaped < 0 && errno != EINTR) return {-1, KVFERRY_ERRNO("lost").message};
    if (deadline.expired()) {
      return {-1, fmt::format("not gone after {} ms", kReapTime.count())};
    }
    // wait: a tracer to let go of a child that has ended; kReapLook, together kReapTime; nothing
    poll(nullptr, 0, ipc::Deadline::after(kReapLook).earlier(deadline).poll_timeout_ms());
  }
  if (WIFSIGNALED(status)) {
    const char* description = sigdescr_np(WTERMSIG(status));
    if (description == nullptr) description = "unknown";
    return {-1, fmt::format("killed by signal {} ({})", WTERMSIG(status), description)};
  }
  return {WEXITSTATUS(status), fmt::format("exit code {}", WEXITSTATUS(status))};
}

std::string tail_of(const std::filesystem::path& file, std::size_t lines) {
  std::ifstream in(file);
  std::deque<std::string> last;
  for (std::string line; std::getline(in, line);) {
    last.push_back(std::move(line));
    if (last.size() > lines) last.pop_front();
  }
  std::string text;
  for (const std::string& line : last) text += "    " + line + "\n";
  return text.empty() ? "    (it logged nothing)\n" : text;
}

}  // namespace kvferry::cli
