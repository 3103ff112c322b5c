// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace kvferry::ipc {

constexpr std::uint64_t kHugePageBytes = 2ULL << 20;

[[nodiscard]] constexpr std::uint64_t round_up_to_huge_page(std::uint64_t bytes) noexcept {
  return (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

/// Address space that begins at a multiple of kHugePageBytes, for a mapping that is put over it
/// (MAP_FIXED): the kernel finds such places for shared memory only where it gives it huge pages
/// unasked, and without one they are neither made nor mapped as such. Null where there is no room.
[[nodiscard]] void* reserve_for_huge_pages(std::uint64_t size_bytes) noexcept;

/// What of a huge page, one of those that make() is told of, is to be there first: one goes to the
/// node that its first page is on, and interleaving (MPOL_INTERLEAVE) tells nodes by page, so that
/// the first page of each would have all of them on one of two nodes. Between 0 and kHugePageBytes.
[[nodiscard]] std::uint64_t first_page_offset(std::uint64_t huge_page,
                                              std::uint64_t nodes,
                                              std::uint64_t page_bytes) noexcept;

/// Has the kernel put new shared memory into huge pages, also where it would not by itself
/// (`shmem_enabled` is never or advise): MADV_COLLAPSE, Linux 6.1. Where it cannot, or takes too
/// long for it since memory is in pieces, memory stays as it is, and soon nothing is tried any
/// more. @threading any
class HugePageMaker {
 public:
  /// Lost to what took longer than kSlowForGiB, or came to nothing, which counts as kLostByFailure
  /// more than it took: beyond this, all together, no more is tried.
  static constexpr std::chrono::milliseconds kMostLost{2000};
  static constexpr std::chrono::milliseconds kLostByFailure{250};
  static constexpr std::chrono::milliseconds kSlowForGiB{5000};

  /// nodes: that pages are interleaved over; see first_page_offset().
  explicit HugePageMaker(bool wanted, std::uint64_t nodes = 1) noexcept
      : nodes_(nodes), tries_(wanted) {}

  /// @pre data is mapped from a multiple of kHugePageBytes on, in memory and in the file alike.
  /// What pages it has keep their contents; some may be there that were not, whatever the answer.
  /// Takes the kernel a few milliseconds at least: it first has each processor put in order what
  /// pages it holds ready.
  void make(std::byte* data, std::uint64_t size_bytes);
  /// So much was asked for and is in huge pages.
  [[nodiscard]] std::uint64_t made_bytes() const noexcept { return made_bytes_; }

 private:
  void lose(std::chrono::nanoseconds time);

  const std::uint64_t nodes_;
  std::atomic<bool> tries_;
  std::atomic<std::uint64_t> made_bytes_ = 0;
  std::atomic<std::int64_t> lost_ns_ = 0;
};

}  // namespace kvferry::ipc
