// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/descriptors.hpp"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <memory>

namespace kvferry::ipc {
namespace {

constexpr const char* kOwnDescriptors = "/proc/self/fd";

// Kernels from 6.2 on give the number as the size of the folder; others want it read.
std::size_t open_descriptors(std::size_t limit) noexcept {
  struct stat info {};
  if (::stat(kOwnDescriptors, &info) == 0 && info.st_size > 0) {
    return static_cast<std::size_t>(info.st_size);
  }
  const auto close = [](DIR* folder) { (void)::closedir(folder); };
  const std::unique_ptr<DIR, decltype(close)> folder(::opendir(kOwnDescriptors), close);
  if (!folder) return limit;
  std::size_t count = 0;
  // NOLINTNEXTLINE(concurrency-mt-unsafe): the folder is this call's own.
  while (const dirent* entry = ::readdir(folder.get())) count += entry->d_name[0] == '.' ? 0 : 1;
  return count - 1;  // Without the folder's own.
}

}  // namespace

std::size_t descriptor_limit() noexcept {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0;
}

std::size_t free_descriptors() noexcept {
  const std::size_t limit = descriptor_limit();
  return limit - std::min(limit, open_descriptors(limit));
}

Status need_descriptors(std::size_t count) {
  const std::size_t free = free_descriptors();
  if (free >= count + kReservedDescriptors) return ok();
  return KVFERRY_ERROR(
      kBusy,
      "{} of this process's {} descriptors are free, {} are kept in reserve; raise "
      "its limit of open files (ulimit -n)",
      free, descriptor_limit(), kReservedDescriptors);
}

bool raise_descriptor_limit(std::size_t wanted) noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
  if (limit.rlim_cur >= wanted) return true;
  limit.rlim_cur = std::min<rlim_t>(wanted, limit.rlim_max);
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur >= wanted;
}

}  // namespace kvferry::ipc
