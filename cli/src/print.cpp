// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "print.hpp"

#include "kvferry/ipc/os/bounded_write.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

namespace kvferry::cli {
namespace {

// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): of the process, as the stream
std::atomic<int> stdout_error{0};
// NOLINTNEXTLINE(cppcoreguidelines-avoid-non-const-global-variables): of the process, as the stream
std::atomic<bool> stderr_gone{false};

// A reader that takes nothing for that long does not get to hold up the run.
constexpr auto kPatience = std::chrono::seconds(1);

/// 0, or the errno of the write that failed. What a command has found out goes to a reader that may
/// take its time, such as a pager: nothing of ours waits for it.
int write_output(std::string_view text) noexcept {
  while (!text.empty()) {
    // wait-idle: the reader of a command's output; the reader, or SIGINT; thread kvferry
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {
      // Somebody made the terminal or pipe non-blocking.
      pollfd room{STDOUT_FILENO, POLLOUT, 0};
      // wait: the reader of a stdout that does not block; kPatience; nothing
      if (::poll(&room, 1, ipc::Deadline::after(kPatience).poll_timeout_ms()) == 0) return EAGAIN;
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

}  // namespace

void prepare_streams() noexcept {
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  (void)::sigaction(SIGPIPE, &ignore, nullptr);
  // A limit on the size of files is an error like a full disk.
  (void)::sigaction(SIGXFSZ, &ignore, nullptr);
  for (const int fd : std::array{STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // Takes the lowest free number, which is this one. What is written there fails, as it should.
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF) (void)::open("/dev/null", O_RDONLY);
  }
}

bool write_out(std::string_view text) noexcept {
  const int error = write_output(text);
  if (error == 0) return true;
  stdout_error = error;
  errno = error;
  return false;
}

bool write_err(std::string_view text) noexcept {
  const int error = ipc::write_bounded(STDERR_FILENO, text, kPatience);
  if (error == 0) return true;
  if (error == EPIPE) stderr_gone = true;
  errno = error;
  return false;
}

bool stderr_reader_gone() noexcept { return stderr_gone; }

bool stdout_complete(std::string_view command) noexcept {
  const int error = stdout_error;
  if (error == 0) return true;
  try {
    print_err("kvferry {}: the output is not complete: {}\n", command, ::strerrordesc_np(error));
  } catch (...) {
    // Out of memory: the exit code tells.
  }
  return false;
}

}  // namespace kvferry::cli
