// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "os/socket_address.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace kvferry::ipc {

Status remove_stale_socket(const std::filesystem::path& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return ok();
    return KVFERRY_ERRNO("stat {}", path.native());
  }
  if (!S_ISSOCK(info.st_mode)) {
    return KVFERRY_ERROR(kAlreadyExists, "{} exists and is no socket (mode {:o}); remove it",
                         path.native(), info.st_mode);
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return KVFERRY_ERRNO("unlink stale socket {}", path.native());
  }
  return ok();
}

Result<UniqueFd> listen_on_path(const std::filesystem::path& path, int type) {
  KVFERRY_ASSIGN(const sockaddr_un address, make_socket_address(path));
  KVFERRY_TRY(remove_stale_socket(path));
  UniqueFd fd(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return KVFERRY_ERRNO("socket for {}", path.native());
  // The file gets the socket's own mode, less the umask: no moment with wider rights, and no change
  // of the umask, which belongs to the whole process.
  constexpr mode_t kPrivateMode = 0600;
  if (::fchmod(fd.get(), kPrivateMode) != 0) return KVFERRY_ERRNO("chmod {}", path.native());
  if (::bind(fd.get(), as_sockaddr(address), sizeof(address)) != 0) {
    return KVFERRY_ERRNO("bind {}", path.native());
  }
  constexpr int kBacklog = 128;
  if (::listen(fd.get(), kBacklog) != 0) {
    const Error error = KVFERRY_ERRNO("listen on {}", path.native());
    ::unlink(path.c_str());
    return error;
  }
  return fd;
}

}  // namespace kvferry::ipc
