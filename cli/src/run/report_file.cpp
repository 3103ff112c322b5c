// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run/report_file.hpp"

#include "kvferry/ipc/base/unique_fd.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>

namespace kvferry::cli {
namespace {

/// A file system over a network may be interrupted by any signal.
ipc::UniqueFd open_interruptibly(const std::filesystem::path& file, int flags, mode_t mode) {
  int fd = -1;
  do {
    fd = ::open(file.c_str(), flags, mode);
  } while (fd < 0 && errno == EINTR);
  return ipc::UniqueFd(fd);
}

}  // namespace

ipc::Status check_report_file(const std::filesystem::path& file) {
  constexpr int kFlags = O_WRONLY | O_CLOEXEC | O_NOCTTY;
  constexpr mode_t kMode = 0600;
  ipc::UniqueFd fd = open_interruptibly(file, kFlags | O_CREAT | O_EXCL, kMode);
  if (fd.valid()) {
    (void)::unlink(file.c_str());
    return ipc::ok();
  }
  if (errno == EEXIST) fd = open_interruptibly(file, kFlags | O_NONBLOCK, kMode);
  if (!fd.valid()) return KVFERRY_ERRNO("report {}", file.string());
  return ipc::ok();
}

ipc::Status write_report_file(std::string_view text, const std::filesystem::path& file) {
  errno = 0;
  std::ofstream out(file, std::ios::trunc);
  out << text;
  out.close();  // some file systems tell only now that there was no room
  if (!out) {
    if (errno == 0) errno = EIO;
    return KVFERRY_ERRNO("report {}", file.string());
  }
  return ipc::ok();
}

}  // namespace kvferry::cli
