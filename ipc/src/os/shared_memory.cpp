// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/shared_memory.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "os/host_memory.hpp"
#include "os/huge_pages.hpp"
#include "os/syscall.hpp"

#include <boost/interprocess/exceptions.hpp>
#include <boost/interprocess/mapped_region.hpp>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

namespace kvferry::ipc {
namespace {

#ifdef MFD_NOEXEC_SEAL
constexpr unsigned kNoExecSeal = MFD_NOEXEC_SEAL;
#else
constexpr unsigned kNoExecSeal = 0x0008U;  // Linux 6.3; absent from older C library headers.
#endif

constexpr unsigned kHugePageFlag = 21U << 26U;  // MFD_HUGE_2MB, of linux/memfd.h

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

// What mapped_region wants of a memory object; borrows the descriptor.
class MappableFd {
 public:
  MappableFd(int fd, boost::interprocess::mode_t mode) : fd_(fd), mode_(mode) {}
  [[nodiscard]] boost::interprocess::mapping_handle_t get_mapping_handle() const {
    return boost::interprocess::ipcdetail::mapping_handle_from_file_handle(fd_);
  }
  [[nodiscard]] boost::interprocess::mode_t get_mode() const { return mode_; }

 private:
  int fd_;
  boost::interprocess::mode_t mode_;
};

Result<boost::interprocess::mapped_region> map(int fd,
                                               boost::interprocess::mode_t mode,
                                               std::uint64_t size_bytes) {
  const auto size = static_cast<std::size_t>(size_bytes);
  // Anywhere where there is no such place. What fails leaves it alone: the kernel may have given
  // the place back before it failed, and another thread may have something there by now.
  void* const place = size_bytes < kHugePageBytes ? nullptr : reserve_for_huge_pages(size_bytes);
  try {
    const MappableFd mappable(fd, mode);
    if (place == nullptr) return boost::interprocess::mapped_region(mappable, mode, 0, size);
    return boost::interprocess::mapped_region(mappable, mode, 0, size, place, MAP_FIXED);
  } catch (const boost::interprocess::interprocess_exception& exception) {
    errno = exception.get_native_error();
    return KVFERRY_ERRNO("mapping {} of shared memory", format_size(size_bytes));
  }
}

Result<UniqueFd> create_memfd(const std::string& name,
                              std::uint64_t size_bytes,
                              unsigned more_flags = 0) {
  if (size_bytes == 0 ||
      size_bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    return KVFERRY_ERROR(kInvalidArgument, "shared memory \"{}\" of {} bytes", name, size_bytes);
  }
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | more_flags;
  UniqueFd fd(::memfd_create(name.c_str(), flags | kNoExecSeal));
  if (!fd.valid() && errno == EINVAL) fd = UniqueFd(::memfd_create(name.c_str(), flags));
  if (!fd.valid()) return KVFERRY_ERRNO("memfd_create \"{}\"", name);
  if (retry_interrupted([&] { return ::ftruncate(fd.get(), static_cast<off_t>(size_bytes)); }) !=
      0) {
    return KVFERRY_ERRNO("sizing shared memory \"{}\" to {}", name, format_size(size_bytes));
  }
  return fd;
}

Status seal(const UniqueFd& fd, const std::string& name, int seals) {
  if (::fcntl(fd.get(), F_ADD_SEALS, seals) != 0) {
    return KVFERRY_ERRNO("sealing shared memory \"{}\"", name);
  }
  return ok();
}

// Size and seals of a descriptor that a peer sent: without the seals it could shrink it under us,
// and our next access would be a SIGBUS.
Status check_segment(const UniqueFd& fd, std::uint64_t size_bytes, int required_seals) {
  struct stat info {};
  if (!fd.valid() || ::fstat(fd.get(), &info) != 0) {
    return KVFERRY_ERROR(kProtocol, "descriptor {} is no shared memory", fd.get());
  }
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (!S_ISREG(info.st_mode) || seals < 0) {
    return KVFERRY_ERROR(kProtocol, "descriptor {} is no sealable shared memory", fd.get());
  }
  if ((seals & required_seals) != required_seals) {
    return KVFERRY_ERROR(kProtocol, "shared memory {} has seals {:#x}, {:#x} are required",
                         fd.get(), seals, required_seals);
  }
  if (size_bytes == 0 || info.st_size < 0 ||
      static_cast<std::uint64_t>(info.st_size) != size_bytes) {
    return KVFERRY_ERROR(kProtocol, "shared memory {} has {} bytes, expected {}", fd.get(),
                         info.st_size, size_bytes);
  }
  return ok();
}

Error no_room(const std::string& name, std::uint64_t size_bytes, std::uint64_t available) {
  return KVFERRY_ERROR(kNoHostMemory,
                       "host pool \"{}\" of {} was asked, {} are available; ask for less or free "
                       "memory",
                       name, format_size(size_bytes), format_size(available));
}

Status reserve_pages(const UniqueFd& fd,
                     const std::string& name,
                     std::uint64_t size_bytes,
                     const std::function<bool()>& give_up) {
  // The kernel would rather end a process than refuse pages: refuse here.
  if (const std::uint64_t available = available_host_bytes(); size_bytes > available) {
    return no_room(name, size_bytes, available);
  }
  // A signal undoes the whole call, so that steps bound what is lost, and how late a wish to end is
  // heard.
  constexpr std::uint64_t kReserveStep = 64ULL << 20;
  for (std::uint64_t offset = 0; offset < size_bytes; offset += kReserveStep) {
    if (give_up && give_up()) {
      return KVFERRY_ERROR(kCancelled, "host pool \"{}\": given up with {} of {} reserved", name,
                           format_size(offset), format_size(size_bytes));
    }
    const std::uint64_t step = std::min(kReserveStep, size_bytes - offset);
    const int result = retry_interrupted([&] {
      return ::fallocate(fd.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(step));
    });
    if (result != 0) {
      if (errno == ENOMEM || errno == ENOSPC) {
        return no_room(name, size_bytes, std::max(offset, available_host_bytes()));
      }
      return KVFERRY_ERRNO("reserving {} for host pool \"{}\"", format_size(size_bytes), name);
    }
  }
  return ok();
}

}  // namespace

struct SharedMapping::State {
  boost::interprocess::mapped_region region;
};

SharedMapping::SharedMapping() noexcept = default;
SharedMapping::SharedMapping(SharedMapping&&) noexcept = default;
SharedMapping& SharedMapping::operator=(SharedMapping&&) noexcept = default;
SharedMapping::~SharedMapping() = default;

std::byte* SharedMapping::data() const noexcept {
  return state_ == nullptr ? nullptr : static_cast<std::byte*>(state_->region.get_address());
}

std::size_t SharedMapping::size_bytes() const noexcept {
  return state_ == nullptr ? 0 : state_->region.get_size();
}

Result<SharedMemory::SingleWriter> SharedMemory::create_single_writer(const std::string& name,
                                                                      std::size_t size_bytes) {
  SingleWriter segment;
  KVFERRY_ASSIGN(segment.fd, create_memfd(name, size_bytes));
  KVFERRY_ASSIGN(auto region, map(segment.fd.get(), boost::interprocess::read_write, size_bytes));
  // Our own mapping stays writable; every later one, in any process, is read-only.
  KVFERRY_TRY(seal(segment.fd, name, kSizeSeals | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL));
  segment.mapping.state_ =
      std::make_unique<SharedMapping::State>(SharedMapping::State{std::move(region)});
  return segment;
}

Result<SharedMapping> SharedMemory::map_single_writer(const UniqueFd& fd, std::size_t size_bytes) {
  KVFERRY_TRY(check_segment(fd, size_bytes, kSizeSeals | F_SEAL_FUTURE_WRITE));
  KVFERRY_ASSIGN(auto region, map(fd.get(), boost::interprocess::read_only, size_bytes));
  SharedMapping mapping;
  mapping.state_ = std::make_unique<SharedMapping::State>(SharedMapping::State{std::move(region)});
  return mapping;
}

Result<UniqueFd> SharedMemory::create_pool(const std::string& name,
                                           std::uint64_t size_bytes,
                                           bool reserve,
                                           const std::function<bool()>& give_up) {
  KVFERRY_ASSIGN(UniqueFd fd, create_memfd(name, size_bytes));
  if (reserve) KVFERRY_TRY(reserve_pages(fd, name, size_bytes, give_up));
  KVFERRY_TRY(seal(fd, name, kSizeSeals | F_SEAL_SEAL));
  return fd;
}

Result<UniqueFd> SharedMemory::create_large_pool(const std::string& name,
                                                 std::uint64_t size_bytes,
                                                 bool wants_huge_pages) {
  if (wants_huge_pages && size_bytes % kHugePageBytes == 0 &&
      size_bytes <= free_huge_page_bytes()) {
    auto huge = create_memfd(name, size_bytes, MFD_HUGETLB | kHugePageFlag);
    if (huge) {
      KVFERRY_TRY(seal(*huge, name, kSizeSeals | F_SEAL_SEAL));
      return huge;
    }
    log_warn("huge pages cannot be had: {}", huge.error().message);
  }
  // The kernel would rather end a process than refuse pages: refuse here.
  if (const std::uint64_t available = available_host_bytes(); size_bytes > available) {
    return no_room(name, size_bytes, available);
  }
  KVFERRY_ASSIGN(UniqueFd fd, create_memfd(name, size_bytes));
  KVFERRY_TRY(seal(fd, name, kSizeSeals | F_SEAL_SEAL));
  return fd;
}

bool SharedMemory::is_of_huge_pages(const UniqueFd& fd) noexcept {
  struct statfs info {};
  return ::fstatfs(fd.get(), &info) == 0 && info.f_type == HUGETLBFS_MAGIC;
}

Status SharedMemory::check_room(const std::string& name,
                                std::uint64_t size_bytes,
                                bool wants_huge_pages,
                                std::uint64_t given_back) {
  const std::uint64_t huge = wants_huge_pages ? free_huge_page_bytes() : 0;
  // Where it cannot be told what is available, it is the largest value.
  const std::uint64_t available = std::max(huge, available_host_bytes());
  if (size_bytes <= given_back || size_bytes - given_back <= available) return ok();
  return no_room(name, size_bytes, available);
}

Result<SharedMapping> SharedMemory::map_pool(const UniqueFd& fd, std::uint64_t size_bytes) {
  KVFERRY_TRY(check_segment(fd, size_bytes, kSizeSeals));
  KVFERRY_ASSIGN(auto region, map(fd.get(), boost::interprocess::read_write, size_bytes));
  SharedMapping mapping;
  mapping.state_ = std::make_unique<SharedMapping::State>(SharedMapping::State{std::move(region)});
  return mapping;
}

}  // namespace kvferry::ipc
