// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/pool_filler.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "kvferry/ipc/os/shared_memory.hpp"
#include "os/huge_pages.hpp"
#include "os/numa_nodes.hpp"
#include "os/syscall.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::uint32_t kMostThreads = 8;
constexpr std::chrono::milliseconds kPagesLook{50};

/// Whoever waits for this process's map of its memory (to grow its heap, say) waits for a step.
constexpr std::uint64_t kStepBytes = 4ULL << 20;

// A piece of the pool as this process sees it, for as long as it is filled: kept mapped it would
// cost page tables.
class PieceMapping {
 public:
  PieceMapping(int fd, std::uint64_t offset, std::uint64_t size_bytes)
      : place_(reserve_for_huge_pages(size_bytes)),
        data_(::mmap(place_,
                     size_bytes,
                     PROT_READ | PROT_WRITE,
                     MAP_SHARED | (place_ == nullptr ? 0 : MAP_FIXED),
                     fd,
                     static_cast<off_t>(offset))),
        size_bytes_(size_bytes) {}
  PieceMapping(const PieceMapping&) = delete;
  PieceMapping& operator=(const PieceMapping&) = delete;
  ~PieceMapping() {
    if (valid()) ::munmap(data_, size_bytes_);
  }
  [[nodiscard]] bool valid() const noexcept { return data_ != MAP_FAILED; }
  [[nodiscard]] void* data() const noexcept { return data_; }
  /// Whether what it maps can be of huge pages.
  [[nodiscard]] bool is_aligned() const noexcept { return place_ != nullptr; }

 private:
  /// Null: the kernel chooses one. Left alone where mapping fails: the kernel may have given it
  /// back before it failed, and another thread may have something there by now.
  void* place_;
  void* data_;
  std::uint64_t size_bytes_;
};

UniqueFd duplicate(const UniqueFd& fd) {
  UniqueFd copy(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) throw Exception(KVFERRY_ERRNO("duplicating the descriptor of a pool"));
  return copy;
}

}  // namespace

PoolFiller::PoolFiller(const UniqueFd& fd,
                       Options options,
                       std::function<void(std::uint64_t)> on_filled,
                       std::function<void(const Error&)> on_failed)
    : fd_(duplicate(fd)),
      options_(std::move(options)),
      huge_pages_(std::make_unique<HugePageMaker>(
          options_.huge_pages && !SharedMemory::is_of_huge_pages(fd_), options_.numa_nodes.size())),
      on_filled_(std::move(on_filled)),
      on_failed_(std::move(on_failed)),
      filled_((options_.size_bytes + kPieceBytes - 1) / kPieceBytes, false) {
  complete_ = std::min<std::uint64_t>(options_.from_bytes / kPieceBytes, filled_.size());
  std::fill_n(filled_.begin(), complete_, true);
  next_ = complete_;
  const std::uint32_t wanted =
      options_.threads > 0
          ? options_.threads
          : std::clamp<std::uint32_t>(std::thread::hardware_concurrency() / 4, 1, kMostThreads);
  const auto count = std::min<std::uint64_t>(wanted, filled_.size() - complete_);
  for (std::uint64_t i = 0; i < count; ++i) {
    threads_.push_back(
        std::make_unique<OwnThread>("kvf-pages", OwnThread::Runs::kOurCode, [this] { run(); }));
  }
}

PoolFiller::~PoolFiller() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  // wait-brief: our threads, each in one piece at most; limit OwnThread::kEndsWithin
  for (const auto& thread : threads_) thread->wait_end();
}

std::optional<std::uint64_t> PoolFiller::take_piece() {
  const std::lock_guard lock(mutex_);
  if (stopping_ || failure_ || next_ == filled_.size()) return std::nullopt;
  return next_++;
}

std::uint64_t PoolFiller::filled_bytes() const {
  return std::min(options_.size_bytes, complete_ * kPieceBytes);
}

void PoolFiller::run() {
  while (const auto piece = take_piece()) {
    const Status done = fill(*piece);
    const std::lock_guard lock(mutex_);
    if (!done) {
      if (!failure_) {
        failure_ = done.error();
        on_failed_(*failure_);
      }
    } else {
      filled_[*piece] = true;
      const std::uint64_t before = complete_;
      while (complete_ < filled_.size() && filled_[complete_]) ++complete_;
      if (complete_ > before) on_filled_(filled_bytes());
    }
    changed_.notify_all();
  }
}

Status PoolFiller::fill(std::uint64_t piece) const {
  const std::uint64_t offset = piece * kPieceBytes;
  const std::uint64_t size = std::min(kPieceBytes, options_.size_bytes - offset);
  const PieceMapping mapping(fd_.get(), offset, size);
  if (!mapping.valid()) {
    return KVFERRY_ERRNO("mapping {} of host pool \"{}\"", format_size(size), options_.name);
  }
  bind_to_nodes(mapping.data(), size, options_.numa_nodes);
  if (options_.huge_pages && mapping.is_aligned()) {
    // Where the kernel gives shared memory huge pages when asked (shmem_enabled is advise); says
    // nothing elsewhere.
    static_cast<void>(::madvise(mapping.data(), size, MADV_HUGEPAGE));
    huge_pages_->make(static_cast<std::byte*>(mapping.data()), size);
  }
  std::uint64_t done = 0;
  const auto populate = [&] {
    const std::uint64_t step = std::min(kStepBytes, size - done);
    return ::madvise(static_cast<std::byte*>(mapping.data()) + done, step, MADV_POPULATE_WRITE);
  };
  while (done < size && retry_interrupted(populate) == 0) done += kStepBytes;
  if (done >= size) return ok();
  if (errno == EINVAL) {  // before Linux 5.14
    const auto allocate = [&] {
      return ::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(size));
    };
    if (retry_interrupted(allocate) == 0) return ok();
  }
  if (errno == ENOMEM || errno == ENOSPC || errno == EFAULT) {
    return KVFERRY_ERROR(
        kNoHostMemory,
        "host pool \"{}\": no memory for the {} from {} on; it serves with what it "
        "has",
        options_.name, format_size(size), format_size(offset));
  }
  return KVFERRY_ERRNO("filling {} of host pool \"{}\"", format_size(size), options_.name);
}

std::uint64_t PoolFiller::huge_page_bytes() const noexcept { return huge_pages_->made_bytes(); }

Status PoolFiller::wait_filled(std::uint64_t size_bytes, const std::function<bool()>& give_up) {
  std::unique_lock lock(mutex_);
  while (filled_bytes() < std::min(size_bytes, options_.size_bytes)) {
    if (failure_) return *failure_;
    lock.unlock();
    const bool given_up = give_up && give_up();
    lock.lock();
    if (given_up) {
      return KVFERRY_ERROR(kCancelled, "host pool \"{}\": given up with {} of {} filled",
                           options_.name, format_size(filled_bytes()),
                           format_size(options_.size_bytes));
    }
    // wait: pages, which the kernel zeroes; kPagesLook, then whoever waits may give up; a failure
    changed_.wait_until(lock, Deadline::after(kPagesLook).when());
  }
  return ok();
}

}  // namespace kvferry::ipc
