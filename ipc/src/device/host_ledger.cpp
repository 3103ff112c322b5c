// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "device/host_ledger.hpp"

#include "device/host_lock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/size.hpp"
#include "os/host_memory.hpp"
#include "os/syscall.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <numeric>
#include <utility>

namespace kvferry::ipc {
namespace {

/// Legacy memory takes one more seal when it is freed; see is_mapped_by_nobody().
int seals_of(HandleKind kind) {
  constexpr int kSize = F_SEAL_GROW | F_SEAL_SHRINK;
  return kind == HandleKind::kLegacy ? kSize : kSize | F_SEAL_SEAL;
}

constexpr std::size_t kMaxNameLength = 64;
/// Claims of a capacity lie above all claims of sizes: 2^61 (hash) + 2^60 (length) < 2^62.
constexpr std::uint64_t kCapacityOffset = 1ULL << 62;
constexpr std::chrono::seconds kLockPatience{10};

/// Where this device's claims start.
Result<std::uint64_t> claim_offset(std::string_view name) {
  struct stat pid_namespace {};
  if (::stat("/proc/self/ns/pid", &pid_namespace) != 0) {
    return KVFERRY_ERRNO("host device {}: look at /proc/self/ns/pid", name);
  }
  const std::string key =
      fmt::format("kvferry-dev|{}|{}|{}", ::geteuid(), pid_namespace.st_ino, name);
  return Digest::hash(key.data(), key.size()).low() >> 3U;
}

Status set_claim(int fd, std::uint64_t offset, std::uint64_t length) {
  struct flock claim {};
  claim.l_type = F_RDLCK;
  claim.l_whence = SEEK_SET;
  claim.l_start = static_cast<off_t>(offset);
  claim.l_len = static_cast<off_t>(length);
  if (::fcntl(fd, F_OFD_SETLK, &claim) != 0) return KVFERRY_ERRNO("claim host device memory");
  return ok();
}

struct ProcText {
  std::string text;
  std::size_t first_read = 0;  ///< What of it came with the first read.
};

Result<ProcText> read_all(const char* path) {
  const UniqueFd file(retry_interrupted([&] { return ::open(path, O_RDONLY | O_CLOEXEC); }));
  if (!file.valid()) return KVFERRY_ERRNO("open {}, which host devices are counted from", path);
  ProcText all;
  std::array<char, 16384> chunk{};
  bool is_first = true;
  for (;;) {
    // wait-brief: a file of /proc; the kernel writes it at once
    const ssize_t count = ::read(file.get(), chunk.data(), chunk.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return KVFERRY_ERRNO("read {}", path);
    if (count == 0) return all;
    all.text.append(chunk.data(), static_cast<std::size_t>(count));
    if (std::exchange(is_first, false)) all.first_read = all.text.size();
  }
}

struct LockTable {
  std::string text;
  bool in_one_read = false;  ///< The kernel holds its locks over one read: a true snapshot.
};

/// One read gives whole locks up to a page. One that leaves more of it than a lock takes was not
/// cut short, whereas what follows a cut may be gone before the next read: that finds nothing. A
/// lock has a line of some 60 bytes, and so has each who waits for it.
constexpr std::size_t kReadBytes = 4096;
constexpr std::size_t kMostLock = 1024;

Result<LockTable> read_lock_table() {
  KVFERRY_ASSIGN(ProcText locks, read_all("/proc/locks"));
  const bool in_one_read =
      locks.text.size() == locks.first_read && locks.first_read + kMostLock < kReadBytes;
  return LockTable{std::move(locks.text), in_one_read};
}

HostLedgerView view_of(const std::string& text, std::uint64_t offset) {
  HostLedgerView view;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    unsigned major = 0;
    unsigned minor = 0;
    std::uint64_t inode = 0;
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    const std::size_t claim = line.find("OFDLCK");
    if (claim == std::string::npos) continue;
    // "2: OFDLCK ADVISORY  READ -1 00:01:49 1234 5678"; others' lines may end in EOF.
    // NOLINTNEXTLINE(cert-err34-c): all five fields must match, and offsets are compared below.
    if (std::sscanf(line.c_str() + claim,
                    "OFDLCK %*s READ %*s %x:%x:%" SCNu64 " %" SCNu64 " %" SCNu64, &major, &minor,
                    &inode, &first, &last) != 5 ||
        last < first) {
      continue;
    }
    const std::uint64_t length = last - first + 1;
    if (first == offset) {
      view.object_bytes.emplace(ObjectId{gnu_dev_makedev(major, minor), inode}, length);
    } else if (first == offset + kCapacityOffset) {
      view.capacities.insert(length);
    }
  }
  return view;
}

bool shows(const HostLedgerView& view, const HostLedgerView& known) {
  return std::includes(view.object_bytes.begin(), view.object_bytes.end(),
                       known.object_bytes.begin(), known.object_bytes.end()) &&
         std::includes(view.capacities.begin(), view.capacities.end(), known.capacities.begin(),
                       known.capacities.end());
}

Status reserve_pages(int fd, std::uint64_t size_bytes) {
  // In pieces: a signal makes the kernel undo the whole call.
  constexpr std::uint64_t kPiece = 256ULL << 20;
  for (std::uint64_t at = 0; at < size_bytes; at += kPiece) {
    const std::uint64_t length = std::min(kPiece, size_bytes - at);
    const int rc = retry_interrupted(
        [&] { return ::fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(length)); });
    if (rc != 0) return KVFERRY_ERRNO("reserve pages");
  }
  return ok();
}

std::string link_target(int fd) {
  std::array<char, 512> target{};
  const std::string link = fmt::format("/proc/self/fd/{}", fd);
  const ssize_t length = ::readlink(link.c_str(), target.data(), target.size());
  return length < 0 ? std::string() : std::string(target.data(), static_cast<std::size_t>(length));
}

}  // namespace

Status check_host_name(std::string_view name) {
  const bool allowed = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
  if (name.empty() || name.size() > kMaxNameLength || !allowed) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "host device name '{}' is not 1 to {} characters of A-Z a-z 0-9 . _ -",
                         name, kMaxNameLength);
  }
  return ok();
}

std::uint64_t HostLedgerView::used_bytes() const noexcept {
  return std::accumulate(object_bytes.begin(), object_bytes.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const auto& entry) { return sum + entry.second; });
}

Result<HostLedgerView> read_host_ledger(std::string_view name, const HostLedgerView& known) {
  KVFERRY_ASSIGN(const std::uint64_t offset, claim_offset(name));
  KVFERRY_ASSIGN(LockTable table, read_lock_table());
  HostLedgerView view = view_of(table.text, offset);
  // A long table comes in several reads, and a lock that ends between two of them shifts the rest,
  // so that one entry can be missed: believe what two looks agree on, else the union of all. Two
  // may miss the same entry, but not what the caller knows of.
  constexpr int kMaxLooks = 8;
  HostLedgerView all = view;
  for (int look = 1; !table.in_one_read && look < kMaxLooks; ++look) {
    KVFERRY_ASSIGN(table, read_lock_table());
    HostLedgerView next = view_of(table.text, offset);
    if (next == view && shows(view, known)) return view;
    all.object_bytes.insert(next.object_bytes.begin(), next.object_bytes.end());
    all.capacities.insert(next.capacities.begin(), next.capacities.end());
    view = std::move(next);
  }
  if (table.in_one_read) return view;
  all.object_bytes.insert(known.object_bytes.begin(), known.object_bytes.end());
  all.capacities.insert(known.capacities.begin(), known.capacities.end());
  return all;
}

Result<ObjectId> object_id(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return KVFERRY_ERRNO("look at a device memory descriptor");
  return ObjectId{info.st_dev, info.st_ino};
}

HostLedger::HostLedger(std::string name, std::uint64_t capacity_bytes)
    : name_(std::move(name)), capacity_bytes_(capacity_bytes) {
  const auto require = [](auto&& result) {
    if (!result.has_value()) throw Exception(std::forward<decltype(result)>(result).error());
  };
  auto offset = claim_offset(name_);
  require(offset);
  presence_ =
      UniqueFd(::memfd_create(fmt::format("kvferry-dev.{}.{}", name_, capacity_bytes_).c_str(),
                              MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!presence_.valid()) throw Exception(KVFERRY_ERRNO("host device {}: memfd_create", name_));
  // Under the lock, so that of two who differ exactly one is refused.
  auto lock = HostLock::acquire(name_, Deadline::after(kLockPatience));
  require(lock);
  require(set_claim(presence_.get(), *offset + kCapacityOffset, capacity_bytes_));
  auto view = read_host_ledger(name_, {.object_bytes = {}, .capacities = {capacity_bytes_}});
  require(view);
  for (const std::uint64_t other : view->capacities) {
    if (other == capacity_bytes_) continue;
    throw Exception(KVFERRY_ERROR(kAlreadyExists,
                                  "host device {} is in use with a capacity of {} bytes, not {}; "
                                  "name one capacity everywhere or choose another device name",
                                  name_, other, capacity_bytes_));
  }
  if (view->capacities.empty()) {
    throw Exception(KVFERRY_ERROR(kSystem,
                                  "host device {}: /proc/locks does not show our own lock; host "
                                  "devices need a /proc that lists record locks",
                                  name_));
  }
}

std::string HostLedger::object_name(std::uint64_t size_bytes, HandleKind kind) const {
  return fmt::format("kvferry-dev.{}.{}.{}.{}", name_, capacity_bytes_, size_bytes,
                     ipc::to_string(kind));
}

Status HostLedger::claim(int fd, std::uint64_t size_bytes) const {
  const auto refused = [&](std::uint64_t used) {
    return KVFERRY_ERROR(kNoDeviceMemory,
                         "host device {}: {} bytes asked, {} bytes free ({} used of {}); release "
                         "memory or choose a larger capacity",
                         name_, size_bytes, capacity_bytes_ - std::min(used, capacity_bytes_), used,
                         capacity_bytes_);
  };
  KVFERRY_ASSIGN(const std::uint64_t offset, claim_offset(name_));
  KVFERRY_ASSIGN(const HostLock lock, HostLock::acquire(name_, Deadline::after(kLockPatience)));
  // Nobody sees more in use than there is: what does not fit is never claimed.
  KVFERRY_ASSIGN(const HostLedgerView before, read_host_ledger(name_));
  const std::uint64_t used = before.used_bytes();
  if (used > capacity_bytes_ || size_bytes > capacity_bytes_ - used) return refused(used);
  // Counted again once claimed: even somebody who cannot see our lock (another network namespace)
  // can at worst make both of us give up, never hand out more than there is.
  KVFERRY_TRY(set_claim(fd, offset, size_bytes));
  KVFERRY_TRY(set_claim(fd, offset + kCapacityOffset, capacity_bytes_));
  KVFERRY_ASSIGN(const ObjectId claimed, object_id(fd));
  KVFERRY_ASSIGN(const HostLedgerView after,
                 read_host_ledger(name_, {.object_bytes = {{claimed, size_bytes}},
                                          .capacities = {capacity_bytes_}}));
  if (after.used_bytes() <= capacity_bytes_) return ok();
  // Others wait for the lock until our caller has closed fd and with it dropped the claim; so it
  // is dropped here, before the lock.
  struct flock all {};
  all.l_type = F_UNLCK;
  all.l_whence = SEEK_SET;
  ::fcntl(fd, F_OFD_SETLK, &all);
  return refused(after.used_bytes() - std::min(after.used_bytes(), size_bytes));
}

Result<UniqueFd> HostLedger::create_object(std::uint64_t size_bytes, HandleKind kind) const {
  // More than the whole device: no claim can hold that, and none is needed to know.
  if (size_bytes == 0 || size_bytes > capacity_bytes_) {
    KVFERRY_ASSIGN(const MemoryInfo info, memory_info());
    return KVFERRY_ERROR(kNoDeviceMemory,
                         "host device {}: {} bytes asked, {} bytes free of {}; release memory or "
                         "choose a larger capacity",
                         name_, size_bytes, info.free_bytes, capacity_bytes_);
  }
  UniqueFd fd(
      ::memfd_create(object_name(size_bytes, kind).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return KVFERRY_ERRNO("host device {}: memfd_create", name_);
  KVFERRY_TRY(claim(fd.get(), size_bytes));
  // The kernel would rather kill somebody than refuse these pages.
  const std::uint64_t available = available_host_bytes();
  if (size_bytes > available) {
    return KVFERRY_ERROR(kNoDeviceMemory,
                         "host device {}: {} asked, but this machine has only {} of memory left; "
                         "choose a smaller capacity",
                         name_, format_size(size_bytes), format_size(available));
  }
  if (retry_interrupted([&] { return ::ftruncate(fd.get(), static_cast<off_t>(size_bytes)); }) !=
      0) {
    return KVFERRY_ERRNO("host device {}: set a size of {} bytes", name_, size_bytes);
  }
  if (const Status reserved = reserve_pages(fd.get(), size_bytes); !reserved.has_value()) {
    return KVFERRY_ERROR(kNoDeviceMemory, "host device {}: {} refused by the kernel ({})", name_,
                         format_size(size_bytes), reserved.error().message);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, seals_of(kind)) != 0) {
    return KVFERRY_ERRNO("host device {}: seal memory", name_);
  }
  return fd;
}

Status HostLedger::check_object(int fd, std::uint64_t size_bytes, HandleKind kind) const {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return KVFERRY_ERRNO("host device {}: imported descriptor", name_);
  const std::string expected = fmt::format("/memfd:{} (deleted)", object_name(size_bytes, kind));
  const std::string target = link_target(fd);
  if (target != expected) {
    return KVFERRY_ERROR(kProtocol,
                         "host device {}: the imported descriptor is '{}', expected '{}'; exporter "
                         "and importer must name one device, size and handle kind",
                         name_, target, expected);
  }
  if (static_cast<std::uint64_t>(info.st_size) != size_bytes) {
    return KVFERRY_ERROR(kProtocol, "host device {}: imported memory has {} bytes, handle says {}",
                         name_, info.st_size, size_bytes);
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & seals_of(kind)) != seals_of(kind)) {
    return KVFERRY_ERROR(kProtocol,
                         "host device {}: imported memory has seals {:#x}, needs {:#x}: it could "
                         "shrink under a mapping",
                         name_, seals, seals_of(kind));
  }
  // The claim must lie on this very open file, or it would end before what is mapped from it. Asked
  // of the descriptor: the table of all locks costs a grace period of the kernel.
  KVFERRY_ASSIGN(const std::uint64_t offset, claim_offset(name_));
  KVFERRY_ASSIGN(const ProcText own, read_all(fmt::format("/proc/self/fdinfo/{}", fd).c_str()));
  const HostLedgerView view = view_of(own.text, offset);
  const auto claim = view.object_bytes.find(ObjectId{info.st_dev, info.st_ino});
  if (claim == view.object_bytes.end() || claim->second != size_bytes) {
    return KVFERRY_ERROR(
        kProtocol,
        "host device {}: imported memory (inode {}) of {} bytes claims {} bytes of "
        "this device",
        name_, info.st_ino, size_bytes, claim == view.object_bytes.end() ? 0 : claim->second);
  }
  return ok();
}

Result<MemoryInfo> HostLedger::memory_info() const {
  KVFERRY_ASSIGN(const HostLedgerView view, read_host_ledger(name_));
  return MemoryInfo{capacity_bytes_ - std::min(view.used_bytes(), capacity_bytes_),
                    capacity_bytes_};
}

}  // namespace kvferry::ipc
