// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/cache_file.hpp"

#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "os/syscall.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace kvferry::ipc {
namespace {

constexpr mode_t kPrivateFolder = 0700;
constexpr mode_t kOthersWrite = 0022;

std::filesystem::path absolute_variable(const char* name) {
  const std::filesystem::path path = environment(name);
  return path.is_absolute() ? path : std::filesystem::path();
}

Status make_folders(const std::filesystem::path& folder) {
  std::filesystem::path made;
  for (const std::filesystem::path& part : folder) {
    made /= part;
    if (::mkdir(made.c_str(), kPrivateFolder) == 0 || errno == EEXIST) continue;
    // A directory that is there may refuse in other words: one of a read-only file system, say.
    std::error_code ignored;
    const int mkdir_errno = errno;
    if (std::filesystem::is_directory(made, ignored)) continue;
    errno = mkdir_errno;
    return KVFERRY_ERRNO("mkdir {}", made.native());
  }
  return ok();
}

Status write_all(int fd, std::string_view text, const std::string& name) {
  while (!text.empty()) {
    // wait-brief: the disk; as long as the kernel takes
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return KVFERRY_ERRNO("write {}", name);
    text.remove_prefix(static_cast<std::size_t>(count));
  }
  return ok();
}

}  // namespace

std::filesystem::path default_cache_dir() {
  if (const auto cache = absolute_variable("XDG_CACHE_HOME"); !cache.empty()) {
    return cache / "kvferry";
  }
  if (const auto home = absolute_variable("HOME"); !home.empty()) {
    return home / ".cache" / "kvferry";
  }
  return {};
}

Result<std::string> read_cache_file(const std::filesystem::path& file, std::uint64_t most_bytes) {
  // O_NONBLOCK: somebody's pipe would make us wait for its writer.
  const UniqueFd fd(retry_interrupted(
      [&] { return ::open(file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); }));
  if (!fd.valid()) return KVFERRY_ERRNO("open {}", file.native());
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return KVFERRY_ERRNO("stat {}", file.native());
  if (!S_ISREG(info.st_mode)) {
    return KVFERRY_ERROR(kInvalidArgument, "{} is not a plain file; remove it", file.native());
  }
  if ((info.st_uid != ::geteuid() && info.st_uid != 0) || (info.st_mode & kOthersWrite) != 0) {
    return KVFERRY_ERROR(kPermission,
                         "{} belongs to uid {} and has mode {:04o}, so that others than uid {} can "
                         "have written it; remove it",
                         file.native(), info.st_uid, info.st_mode & 07777, ::geteuid());
  }
  std::string text;
  text.resize(most_bytes + 1);  // one more: it may grow while it is read
  std::uint64_t filled = 0;
  while (filled < text.size()) {
    // wait-brief: the disk; as long as the kernel takes
    const ssize_t count = ::read(fd.get(), text.data() + filled, text.size() - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return KVFERRY_ERRNO("read {}", file.native());
    if (count == 0) break;
    filled += static_cast<std::uint64_t>(count);
  }
  if (filled > most_bytes) {
    return KVFERRY_ERROR(kInvalidArgument, "{} has more than {} bytes; remove it", file.native(),
                         most_bytes);
  }
  text.resize(filled);
  return text;
}

Status write_cache_file(const std::filesystem::path& file, std::string_view text) {
  KVFERRY_TRY(make_folders(file.parent_path()));
  std::string made = file.native() + ".XXXXXX";
  const UniqueFd fd(::mkostemp(made.data(), O_CLOEXEC));  // 0600
  if (!fd.valid()) return KVFERRY_ERRNO("make {}", made);
  // Without fsync: a file that a power failure cut is found to be damaged, and made anew.
  Status written = write_all(fd.get(), text, made);
  if (written && ::rename(made.c_str(), file.c_str()) != 0) {
    written = KVFERRY_ERRNO("rename {} to {}", made, file.native());
  }
  if (!written) ::unlink(made.c_str());
  return written;
}

Result<std::optional<CacheLock>> CacheLock::try_take(const std::filesystem::path& dir) {
  KVFERRY_TRY(make_folders(dir));
  const std::filesystem::path file = dir / "lock";
  UniqueFd fd(retry_interrupted([&] {
    return ::open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
  }));
  if (!fd.valid()) return KVFERRY_ERRNO("open {}", file.native());
  // wait-none: LOCK_NB
  if (retry_interrupted([&] { return ::flock(fd.get(), LOCK_EX | LOCK_NB); }) == 0) {
    return std::optional(CacheLock(std::move(fd)));
  }
  if (errno == EWOULDBLOCK) return std::optional<CacheLock>();
  return KVFERRY_ERRNO("lock {}", file.native());
}

}  // namespace kvferry::ipc
