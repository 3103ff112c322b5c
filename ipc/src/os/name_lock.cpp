// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "os/syscall.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <string>
#include <utility>

namespace kvferry::ipc {
namespace {

std::filesystem::path lock_path(const std::filesystem::path& name) {
  return name.native() + ".lock";
}

// For the error text only: the lock is what counts, the number may be a moment old.
std::string holder_text(int fd) {
  std::array<char, 16> text{};
  const ssize_t size = retry_interrupted([&] { return ::pread(fd, text.data(), text.size(), 0); });
  int pid = 0;
  if (size > 0 && std::from_chars(text.data(), text.data() + size, pid).ec == std::errc{}) {
    return fmt::format("process {}", pid);
  }
  return "a process that is just starting";
}

bool try_lock(int fd) noexcept {
  struct flock lock {};  // pid 0, the whole file
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return retry_interrupted([&] { return ::fcntl(fd, F_OFD_SETLK, &lock); }) == 0;
}

}  // namespace

NameLock::NameLock(UniqueFd fd, std::filesystem::path name)
    : fd_(std::move(fd)), name_(std::move(name)) {}

Result<NameLock> NameLock::acquire(const std::filesystem::path& name) {
  const std::filesystem::path path = lock_path(name);
  // Each round is one holder that ended between our open and our lock.
  constexpr int kMaxRounds = 100;
  for (int round = 0; round < kMaxRounds; ++round) {
    UniqueFd fd(retry_interrupted([&] {
      return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    }));
    if (!fd.valid()) {
      if (errno == ELOOP) {
        return KVFERRY_ERROR(kPermission, "{} is a symbolic link; remove it", path.native());
      }
      return KVFERRY_ERRNO("open lock {}", path.native());
    }
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0) return KVFERRY_ERRNO("stat {}", path.native());
    if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) {
      return KVFERRY_ERROR(kPermission, "{} is not a regular file of uid {} (owner {}, mode {:o})",
                           path.native(), ::geteuid(), info.st_uid, info.st_mode);
    }
    if (!try_lock(fd.get())) {
      if (errno != EAGAIN && errno != EACCES) return KVFERRY_ERRNO("lock {}", path.native());
      return KVFERRY_ERROR(kAlreadyExists, "{} is held by {}; stop it or choose another name",
                           name.native(), holder_text(fd.get()));
    }
    // The last holder unlinks the file before it lets go: a lock on a file that no longer has the
    // name protects nothing.
    struct stat named {};
    if (::lstat(path.c_str(), &named) != 0 || named.st_ino != info.st_ino ||
        named.st_dev != info.st_dev) {
      continue;
    }
    const std::string pid = fmt::format("{}\n", ::getpid());
    if (::ftruncate(fd.get(), 0) != 0 ||
        ::pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
      const Error error = KVFERRY_ERRNO("write {}", path.native());
      ::unlink(path.c_str());
      return error;
    }
    return NameLock(std::move(fd), name);
  }
  return KVFERRY_ERROR(kBusy, "{} changed hands {} times while it was being locked", path.native(),
                       kMaxRounds);
}

NameLock& NameLock::operator=(NameLock&& other) noexcept {
  NameLock old(std::move(*this));
  fd_ = std::move(other.fd_);
  name_ = std::move(other.name_);
  return *this;
}

NameLock::~NameLock() {
  if (!fd_.valid()) return;
  try {
    // Only what a listener of ours can have made: the lock may end because something else is there.
    struct stat info {};
    const bool is_socket = ::lstat(name_.c_str(), &info) == 0 && S_ISSOCK(info.st_mode);
    if (is_socket && ::unlink(name_.c_str()) != 0 && errno != ENOENT) {
      log_warn("{}", KVFERRY_ERRNO("unlink {}", name_.native()).to_string());
    }
    const std::filesystem::path path = lock_path(name_);
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
      log_warn("{}", KVFERRY_ERRNO("unlink {}", path.native()).to_string());
    }
  } catch (...) {
    // Out of memory: a stale name is replaced later.
  }
}

}  // namespace kvferry::ipc
