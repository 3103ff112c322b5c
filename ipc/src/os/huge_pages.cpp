// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "os/huge_pages.hpp"

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "os/syscall.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace kvferry::ipc {
namespace {

#ifdef MADV_COLLAPSE
constexpr int kCollapse = MADV_COLLAPSE;
#else
constexpr int kCollapse = 25;  // Linux 6.1; absent from older C library headers.
#endif

std::uint64_t page_bytes() noexcept {
  static const auto kBytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return kBytes;
}

}  // namespace

void* reserve_for_huge_pages(std::uint64_t size_bytes) noexcept {
  const std::uint64_t size = (size_bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  void* const all = ::mmap(nullptr, size + kHugePageBytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  auto* const start = static_cast<std::byte*>(all);
  const auto at = reinterpret_cast<std::uintptr_t>(start);
  const std::uint64_t before = round_up_to_huge_page(at) - at;
  if (before > 0) ::munmap(start, before);
  if (before < kHugePageBytes) ::munmap(start + before + size, kHugePageBytes - before);
  return start + before;
}

std::uint64_t first_page_offset(std::uint64_t huge_page,
                                std::uint64_t nodes,
                                std::uint64_t page_bytes) noexcept {
  if (nodes <= 1) return 0;
  const std::uint64_t pages = kHugePageBytes / page_bytes;
  // The node of page p is (p + something) % nodes: that of the page at `offset` pages of huge page
  // h is to be (h + something) % nodes.
  const std::uint64_t there = pages % nodes * (huge_page % nodes) % nodes;
  const std::uint64_t offset = (huge_page % nodes + nodes - there) % nodes;
  return offset % pages * page_bytes;
}

void HugePageMaker::make(std::byte* data, std::uint64_t size_bytes) {
  const std::uint64_t size = size_bytes / kHugePageBytes * kHugePageBytes;
  if (size == 0 || !tries_) return;
  // The kernel makes none of nothing at all. By a call, since a touch ends the process where memory
  // is out.
  for (std::uint64_t at = 0; at < size; at += kHugePageBytes) {
    const std::uint64_t page = at + first_page_offset(at / kHugePageBytes, nodes_, page_bytes());
    const auto first_page = [&] {
      return ::madvise(data + page, page_bytes(), MADV_POPULATE_WRITE);
    };
    if (retry_interrupted(first_page) != 0) return;
  }
  // One call for all of it: each first waits for every processor (lru_add_drain_all).
  const TimePoint began = MonotonicClock::now();
  const int result = retry_interrupted([&] { return ::madvise(data, size, kCollapse); });
  const int error = errno;
  const std::chrono::nanoseconds took = MonotonicClock::now() - began;
  if (result == 0) {
    made_bytes_ += size;
    const std::chrono::nanoseconds usual =
        std::chrono::nanoseconds(kSlowForGiB) * size / (1ULL << 30);
    lose(std::max(took - usual, std::chrono::nanoseconds(0)));
  } else if (error == EINVAL) {
    if (tries_.exchange(false)) {
      log_info(
          "the kernel makes no huge pages of shared memory for this process (Linux 6.1 does, "
          "unless "
          "transparent_hugepage/shmem_enabled is deny, or the process was started without them, by "
          "PR_SET_THP_DISABLE): small ones are used");
    }
  } else {
    log_debug("{} in huge pages: {}", format_size(size), std::generic_category().message(error));
    lose(took + kLostByFailure);
  }
}

void HugePageMaker::lose(std::chrono::nanoseconds time) {
  const std::chrono::nanoseconds lost(lost_ns_ += time.count());
  if (lost < kMostLost || !tries_.exchange(false)) return;
  log_info("huge pages are not to be had readily: what is left uses small ones");
}

}  // namespace kvferry::ipc
