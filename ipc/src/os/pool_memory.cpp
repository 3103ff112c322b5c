// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/pool_memory.hpp"

#include <fcntl.h>
#include <sys/stat.h>

namespace kvferry::ipc {
namespace {

Result<UniqueFd> duplicate_of(const UniqueFd& fd) {
  if (!fd.valid()) return UniqueFd();
  UniqueFd copy(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return KVFERRY_ERRNO("duplicating the pool's descriptor {}", fd.get());
  return copy;
}

}  // namespace

Result<PoolMemory> PoolMemory::duplicate() const {
  PoolMemory copy;
  copy.id = id;
  copy.pool_bytes = pool_bytes;
  copy.catalogue_bytes = catalogue_bytes;
  KVFERRY_ASSIGN(copy.pool, duplicate_of(pool));
  KVFERRY_ASSIGN(copy.catalogue, duplicate_of(catalogue));
  return copy;
}

bool is_same_memory(const UniqueFd& a, const UniqueFd& b) noexcept {
  struct stat one {};
  struct stat other {};
  return a.valid() && b.valid() && ::fstat(a.get(), &one) == 0 && ::fstat(b.get(), &other) == 0 &&
         one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

}  // namespace kvferry::ipc
