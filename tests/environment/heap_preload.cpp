// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Preloaded into a process (LD_PRELOAD), counts what it has allocated and not freed:
// environment/heap_gauge.hpp. glibc's allocator does the work, and stands here under its own names.
#include "environment/heap_gauge.hpp"

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

extern "C" {
void* __libc_malloc(std::size_t size);
void __libc_free(void* block);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* block, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
}

namespace {

using kvferry::test::HeapGauge;

// Until the file is mapped, and of a forked child, whose memory is a copy.
HeapGauge unread{};
std::atomic<HeapGauge*> gauge{&unread};

void in_child() { gauge = &unread; }

__attribute__((constructor)) void begin() {
  (void)::pthread_atfork(nullptr, nullptr, in_child);
  const char* folder = ::getenv(kvferry::test::kHeapFolderVariable);
  if (folder == nullptr) return;
  char path[4096];
  (void)std::snprintf(path, sizeof(path), "%s/%d", folder, ::getpid());
  const int fd = ::open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return;
  void* memory = MAP_FAILED;
  if (::ftruncate(fd, sizeof(HeapGauge)) == 0) {
    memory = ::mmap(nullptr, sizeof(HeapGauge), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  ::close(fd);
  if (memory == MAP_FAILED) return;
  // No other thread runs yet.
  auto* mapped = static_cast<HeapGauge*>(memory);
  mapped->live_bytes = unread.live_bytes.load();
  gauge = mapped;
}

void count(void* block, int sign) {
  if (block == nullptr) return;
  const auto bytes = static_cast<std::int64_t>(::malloc_usable_size(block));
  gauge.load(std::memory_order_relaxed)
      ->live_bytes.fetch_add(sign * bytes, std::memory_order_relaxed);
}

void* counted(void* block) {
  count(block, 1);
  return block;
}

}  // namespace

extern "C" {

void* malloc(std::size_t size) { return counted(__libc_malloc(size)); }

void free(void* block) {
  count(block, -1);
  __libc_free(block);
}

void* calloc(std::size_t count_of, std::size_t size) {
  return counted(__libc_calloc(count_of, size));
}

void* realloc(void* block, std::size_t size) {
  const auto before = block == nullptr ? 0 : static_cast<std::int64_t>(::malloc_usable_size(block));
  void* moved = __libc_realloc(block, size);
  // With 0 it is a free(); where there is no memory, the old block stays.
  if (moved == nullptr && size != 0) return nullptr;
  gauge.load(std::memory_order_relaxed)->live_bytes.fetch_sub(before, std::memory_order_relaxed);
  return counted(moved);
}

void* memalign(std::size_t alignment, std::size_t size) {
  return counted(__libc_memalign(alignment, size));
}

void* aligned_alloc(std::size_t alignment, std::size_t size) { return memalign(alignment, size); }

int posix_memalign(void** block, std::size_t alignment, std::size_t size) {
  if (alignment % sizeof(void*) != 0 || (alignment & (alignment - 1)) != 0 || alignment == 0) {
    return EINVAL;
  }
  void* found = memalign(alignment, size);
  if (found == nullptr) return ENOMEM;
  *block = found;
  return 0;
}

void* valloc(std::size_t size) {
  return memalign(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)), size);
}

void* pvalloc(std::size_t size) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return memalign(page, (size + page - 1) / page * page);
}
}
