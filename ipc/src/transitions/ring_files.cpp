// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "transitions/ring_files.hpp"

#include "kvferry/ipc/base/unique_fd.hpp"
#include "os/syscall.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace kvferry::ipc::transitions {

Result<std::filesystem::path> make_ring_folder(const RuntimeDir& dir) {
  std::filesystem::path folder = dir.transitions_folder();
  // Its parent is ours alone (0700), so nobody else can have put something else there.
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return KVFERRY_ERRNO("mkdir {}", folder.native());
  }
  // What is there may be a slip of this very user: files of old rings are removed in it.
  struct stat info {};
  if (::lstat(folder.c_str(), &info) != 0) return KVFERRY_ERRNO("stat {}", folder.native());
  if (!S_ISDIR(info.st_mode) || info.st_uid != ::geteuid()) {
    return KVFERRY_ERROR(kPermission,
                         "{} is no directory of uid {} (owner {}, mode {:o}); remove it",
                         folder.native(), ::geteuid(), info.st_uid, info.st_mode);
  }
  return folder;
}

std::string ring_name(const TransitionWriter& writer) {
  return fmt::format("{}.{}.{}.{}.{:016x}", writer.role, writer.engine, writer.rank.value,
                     writer.pid, writer.incarnation.low());
}

Status lock_ring(int ring_fd) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  if (::fcntl(ring_fd, F_OFD_SETLK, &lock) != 0) return KVFERRY_ERRNO("lock a ring of transitions");
  return ok();
}

// Only asks: taking the lock for a moment could be in the way of its writer.
bool is_written(int ring_fd) noexcept {
  struct flock lock {};
  lock.l_type = F_RDLCK;
  lock.l_whence = SEEK_SET;
  return ::fcntl(ring_fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void remove_ended_rings(const std::filesystem::path& folder, std::size_t keep) {
  std::vector<std::pair<std::filesystem::file_time_type, std::filesystem::path>> ended;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const UniqueFd fd(retry_interrupted([&] {
      return ::open(entry.path().c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    }));
    if (!fd.valid() || is_written(fd.get())) continue;
    ended.emplace_back(entry.last_write_time(ignored), entry.path());
  }
  if (ended.size() <= keep) return;
  std::sort(ended.begin(), ended.end());
  for (std::size_t i = 0; i + keep < ended.size(); ++i) (void)::unlink(ended[i].second.c_str());
}

}  // namespace kvferry::ipc::transitions
