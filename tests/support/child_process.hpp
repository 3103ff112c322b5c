// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <sys/types.h>

#include <csignal>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::test {

/// How a child ended.
struct ChildExit {
  bool by_signal = false;
  int code = 0;  ///< Signal number when by_signal, else exit code.

  static ChildExit exited(int code) { return ChildExit{false, code}; }
  static ChildExit killed_by(int signal_number) { return ChildExit{true, signal_number}; }
  friend bool operator==(const ChildExit&, const ChildExit&) = default;
  friend std::ostream& operator<<(std::ostream& out, const ChildExit& exit);
};

struct ChildOptions {
  std::string program;                        ///< Path; sibling_program() finds helpers.
  std::vector<std::string> arguments = {};    ///< Without argv[0].
  std::vector<std::string> environment = {};  ///< NAME=VALUE, on top of ours.
  std::vector<int> pass_fds = {};             ///< Become 3, 4, ... in the child; still ours here.
  bool capture_stderr = true;                 ///< False: the child writes to our stderr.
};

/// One real child process with its three standard streams: we write lines to its stdin, read lines
/// from its stdout and look at all of its stderr. The child gets no other descriptor than these and
/// pass_fds, default signal handling and an empty signal mask.
/// @threading one at a time. @lifetime the destructor kills (SIGKILL) and reaps.
class ChildProcess {
 public:
  /// Throws ipc::Exception when it cannot be started.
  explicit ChildProcess(ChildOptions options);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  [[nodiscard]] pid_t pid() const noexcept { return pid_; }
  /// For poll(2): readable once the child is dead.
  [[nodiscard]] int pidfd() const noexcept { return pidfd_.get(); }

  /// The next line of stdout without its end. Nothing when the deadline passes, or when the child
  /// has closed stdout or died and all it wrote has been read.
  [[nodiscard]] std::optional<std::string> read_line(ipc::Deadline deadline);
  /// Reads lines until one equals text; lines before it are dropped.
  [[nodiscard]] bool wait_line(std::string_view text, ipc::Deadline deadline);
  /// False when the child no longer reads.
  bool write_line(std::string_view text);
  void close_stdin() noexcept { stdin_.reset(); }

  /// Sends the signal to this very child; does nothing when it is dead.
  void signal(int signal_number) noexcept;
  void kill() noexcept { signal(SIGKILL); }
  /// SIGSTOP, and waits until every thread has stopped: the signal alone is no such promise. False
  /// when it is dead.
  [[nodiscard]] bool stop() noexcept;
  /// Whether every thread has stopped, by another signal than stop()'s.
  [[nodiscard]] bool has_stopped() const noexcept;
  /// Waits for its end and reaps it; nothing when it still runs at the deadline. Call as often as
  /// you like: once ended, always the same answer.
  [[nodiscard]] std::optional<ChildExit> wait(ipc::Deadline deadline);
  /// Waits for its death without reaping it: it stays a zombie until wait().
  [[nodiscard]] bool wait_zombie(ipc::Deadline deadline) const noexcept;

  /// Everything written to stderr so far. Empty when not captured.
  [[nodiscard]] std::string stderr_text() const;

 private:
  void read_available() noexcept;
  void end() noexcept;

  pid_t pid_ = -1;
  std::optional<ChildExit> exit_;
  ipc::UniqueFd pidfd_;
  ipc::UniqueFd stdin_;   ///< Our end of a socket pair: a write to a dead child is no SIGPIPE.
  ipc::UniqueFd stdout_;  ///< Read end of a pipe, non-blocking.
  ipc::UniqueFd stderr_;  ///< A memfd: the child never blocks on it.
  std::string unread_;
  bool stdout_ended_ = false;
};

/// Path of a binary in the folder of the running one.
[[nodiscard]] std::string sibling_program(std::string_view name);

/// A deadline that only a hang reaches; tests wait for conditions, not for this.
[[nodiscard]] inline ipc::Deadline soon() { return ipc::Deadline::after(std::chrono::seconds(45)); }

}  // namespace kvferry::test
