// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "print.hpp"

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

/// 0, or the errno of the write that failed.
int write_all(int fd, std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EAGAIN) {
      // Somebody made the terminal or pipe non-blocking. A reader that takes nothing for that long
      // does not get to hold up the run.
      constexpr int kPatienceMs = 1000;
      pollfd room{fd, POLLOUT, 0};
      if (::poll(&room, 1, kPatienceMs) == 0) return EAGAIN;
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
  for (const int fd : std::array{STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // Takes the lowest free number, which is this one. What is written there fails, as it should.
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF) (void)::open("/dev/null", O_RDONLY);
  }
}

bool write_out(std::string_view text) noexcept {
  const int error = write_all(STDOUT_FILENO, text);
  if (error == 0) return true;
  stdout_error = error;
  errno = error;
  return false;
}

bool write_err(std::string_view text) noexcept {
  const int error = write_all(STDERR_FILENO, text);
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
