// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/bounded_write.hpp"

#include "os/syscall.hpp"

#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace kvferry::ipc {
namespace {

/// As write(2), but with EAGAIN instead of a wait for room, where the kernel knows how.
ssize_t write_now(int fd, std::string_view text) noexcept {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast): it is not written to.
  const iovec part{const_cast<char*>(text.data()), text.size()};
  // wait-none: RWF_NOWAIT
  const ssize_t written = ::pwritev2(fd, &part, 1, -1, RWF_NOWAIT);
  if (written >= 0 || (errno != EOPNOTSUPP && errno != ENOSYS && errno != EINVAL)) return written;
  // poll() has found room for PIPE_BUF bytes.
  // wait-brief: room for PIPE_BUF bytes, which poll() has found; only another writer of the same
  // pipe can have taken it
  return ::write(fd, text.data(), text.size());
}

bool is_regular(int fd) noexcept {
  struct stat info {};
  return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
}

}  // namespace

int write_bounded(int fd, std::string_view text, Duration patience) noexcept {
  if (fd < 0) return EBADF;  // poll() ignores it
  const bool regular = is_regular(fd);
  Deadline deadline = Deadline::after(patience);
  while (!text.empty()) {
    ssize_t written = -1;
    if (regular) {
      // Nobody reads it away: waiting is the disk's business.
      // wait-brief: the disk; as long as the kernel takes
      written = ::write(fd, text.data(), text.size());
    } else {
      // wait: the reader of a log or of messages; deadline (patience, of the caller); the end of
      // the reader
      const int ready = poll_until(fd, POLLOUT, deadline);
      if (ready == 0) return EAGAIN;
      written = write_now(fd, text.substr(0, std::min<std::size_t>(text.size(), PIPE_BUF)));
    }
    if (written > 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
      deadline = Deadline::after(patience);
    } else if (written == 0 || (errno != EINTR && errno != EAGAIN)) {
      return written == 0 ? EIO : errno;
    } else if (deadline.expired()) {
      return EAGAIN;
    }
  }
  return 0;
}

}  // namespace kvferry::ipc
