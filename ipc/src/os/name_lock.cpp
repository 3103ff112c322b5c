// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "os/syscall.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

// Byte ranges of the lock file. The holder of a name locks the first byte for life; whoever removes
// a file that is stale locks the second one meanwhile, so that no two of them do it, and none
// removes the file of the other's successor.
constexpr off_t kHeld = 0;
constexpr off_t kRemoving = 1;

/// What a holder writes into its file: enough to prove its death later.
struct Holder {
  pid_t pid = 0;
  std::uint64_t start_time = 0;
  std::uint64_t pid_namespace = 0;
  std::uint64_t time_namespace = 0;
};

constexpr std::string_view kSuffix = ".lock";

std::filesystem::path lock_path(const std::filesystem::path& name) {
  return name.native() + std::string(kSuffix);
}

/// The name that a lock file is for; nothing for other files.
std::optional<std::string> locked_name(const std::filesystem::path& file) {
  std::string name = file.filename().native();
  if (name.size() <= kSuffix.size() || !name.ends_with(kSuffix)) return std::nullopt;
  name.resize(name.size() - kSuffix.size());
  return name;
}

/// Process ids mean something inside one pid namespace only, start times inside one time namespace;
/// 0 when it cannot be told, such as on a kernel without them.
std::uint64_t own_namespace(const char* kind) {
  struct stat info {};
  return ::stat(fmt::format("/proc/self/ns/{}", kind).c_str(), &info) == 0 ? info.st_ino : 0;
}

template <typename T> bool take_number(std::string_view& text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end == text.data() + text.size()) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()) + 1);
  return true;
}

/// Nothing while the holder has not written it.
std::optional<Holder> read_holder(int fd) {
  std::array<char, 96> buffer{};
  const ssize_t size =
      retry_interrupted([&] { return ::pread(fd, buffer.data(), buffer.size(), 0); });
  if (size <= 0) return std::nullopt;
  std::string_view text(buffer.data(), static_cast<std::size_t>(size));
  Holder holder;
  if (!take_number(text, holder.pid) || !take_number(text, holder.start_time) ||
      !take_number(text, holder.pid_namespace) || !take_number(text, holder.time_namespace)) {
    return std::nullopt;
  }
  return holder;
}

Status write_holder(int fd, const std::filesystem::path& path) {
  KVFERRY_ASSIGN(const ProcessRef self, ProcessRef::of_pid(::getpid()));
  const std::string text = fmt::format("{} {} {} {}\n", self.pid(), self.start_time(),
                                       own_namespace("pid"), own_namespace("time"));
  const ssize_t written =
      retry_interrupted([&] { return ::pwrite(fd, text.data(), text.size(), 0); });
  if (written != static_cast<ssize_t>(text.size())) {
    return KVFERRY_ERRNO("write {}", path.native());
  }
  return ok();
}

/// A lock outlives its holder in a child that the holder had forked: the lock then proves nothing.
bool is_dead(const Holder& holder) {
  const std::uint64_t here = own_namespace("pid");
  if (here == 0 || holder.pid <= 0 || holder.pid_namespace != here) return false;
  const auto process = ProcessRef::of_pid(holder.pid);
  if (!process) return process.error().code == ErrorCode::kPeerDied;
  if (process->has_died()) return true;
  // Another process by now? Clocks of other time namespaces are shifted: that proves nothing.
  return holder.time_namespace == own_namespace("time") &&
         process->start_time() != holder.start_time;
}

// For the error text: the lock is what counts, the number may be a moment old.
std::string describe(const std::optional<Holder>& holder) {
  return holder ? fmt::format("process {}", holder->pid) : "a process that is just starting";
}

bool try_lock(int fd, off_t byte) noexcept {
  struct flock lock {};  // pid 0
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return retry_interrupted([&] { return ::fcntl(fd, F_OFD_SETLK, &lock); }) == 0;
}

bool is_named(const std::filesystem::path& path, int fd) noexcept {
  struct stat mine {};
  struct stat named {};
  return ::fstat(fd, &mine) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         named.st_ino == mine.st_ino && named.st_dev == mine.st_dev;
}

/// @pre kRemoving of this very file is locked, or kHeld while it is empty. Its socket goes first: a
/// name is never left without its lock file.
void remove_names(const std::filesystem::path& name) {
  // Only what a listener of ours can have made: the lock may end because something else is there.
  struct stat info {};
  const bool is_socket = ::lstat(name.c_str(), &info) == 0 && S_ISSOCK(info.st_mode);
  if (is_socket && ::unlink(name.c_str()) != 0 && errno != ENOENT) {
    log_warn("{}", KVFERRY_ERRNO("unlink {}", name.native()).to_string());
  }
  const std::filesystem::path path = lock_path(name);
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    log_warn("{}", KVFERRY_ERRNO("unlink {}", path.native()).to_string());
  }
}

bool is_free(int fd, off_t byte) noexcept {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return retry_interrupted([&] { return ::fcntl(fd, F_OFD_GETLK, &lock); }) == 0 &&
         lock.l_type == F_UNLCK;
}

/// Removes a file whose holder is gone. False when somebody else is at it.
bool remove_stale(const std::filesystem::path& name, int fd) {
  if (!try_lock(fd, kRemoving)) return false;
  if (is_named(lock_path(name), fd)) remove_names(name);
  return true;
}

Result<UniqueFd> open_lock(const std::filesystem::path& path, int flags) {
  UniqueFd fd(retry_interrupted([&] {
    return ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | flags, 0600);
  }));
  if (!fd.valid()) {
    if (errno == ELOOP) {
      return KVFERRY_ERROR(kPermission, "{} is a symbolic link; remove it", path.native());
    }
    return KVFERRY_ERRNO("open lock {}", path.native());
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return KVFERRY_ERRNO("stat {}", path.native());
  if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) {
    return KVFERRY_ERROR(kPermission, "{} is not a regular file of uid {} (owner {}, mode {:o})",
                         path.native(), ::geteuid(), info.st_uid, info.st_mode);
  }
  return fd;
}

/// Somebody else removes the file or writes it, which takes two system calls and signals nothing:
/// with the number of rounds this bounds how long we put up with one that was stopped in between.
void pause_while_others_finish() {
  constexpr int kPauseMs = 10;
  // wait: another process to remove or write a lock file; kPauseMs, kMaxRounds times; nothing
  ::poll(nullptr, 0, kPauseMs);
}

bool is_empty(int fd) noexcept {
  struct stat info {};
  return ::fstat(fd, &info) == 0 && info.st_size == 0;
}

/// Removes a file that nobody has written and nobody has locked: left by a process that died
/// between the two. One that is about to lock it finds that the file has lost its name.
bool remove_unwritten(const std::filesystem::path& name, int fd) {
  if (!try_lock(fd, kHeld) || !is_empty(fd) || !is_named(lock_path(name), fd)) return false;
  remove_names(name);
  return true;
}

/// The lock is another's. Ok: look again, it may be gone by then.
Status look_at_holder(const std::filesystem::path& name, int fd, int& unwritten) {
  // Locked and not written yet: by its holder, or by who is about to remove it.
  constexpr int kMaxUnwritten = 10;
  const std::optional<Holder> holder = read_holder(fd);
  if (!holder && ++unwritten < kMaxUnwritten) {
    pause_while_others_finish();
    return ok();
  }
  if (!holder || !is_dead(*holder)) {
    return KVFERRY_ERROR(kAlreadyExists, "{} is held by {}; stop it or choose another name",
                         name.native(), describe(holder));
  }
  log_warn("{}: its holder, process {}, is dead, but a child of it keeps the lock: taken over",
           name.native(), holder->pid);
  if (!remove_stale(name, fd)) pause_while_others_finish();
  return ok();
}

}  // namespace

NameLock::NameLock(UniqueFd fd, std::filesystem::path name)
    : fd_(std::move(fd)), name_(std::move(name)) {}

Result<NameLock> NameLock::acquire(const std::filesystem::path& name) {
  const std::filesystem::path path = lock_path(name);
  // Each round is one holder, or one stale file, that went between our open and our lock.
  constexpr int kMaxRounds = 100;
  int unwritten = 0;
  for (int round = 0; round < kMaxRounds; ++round) {
    KVFERRY_ASSIGN(UniqueFd fd, open_lock(path, O_CREAT));
    if (!try_lock(fd.get(), kHeld)) {
      if (errno != EAGAIN && errno != EACCES) return KVFERRY_ERRNO("lock {}", path.native());
      KVFERRY_TRY(look_at_holder(name, fd.get(), unwritten));
      continue;
    }
    // The last holder unlinks the file before it lets go: a lock on a file that no longer has the
    // name protects nothing.
    if (!is_named(path, fd.get())) continue;
    if (!is_empty(fd.get())) {
      // Left by a dead holder. Not written over: until we had, others would read its death there
      // and take our lock for one of its children's.
      if (!remove_stale(name, fd.get())) pause_while_others_finish();
      continue;
    }
    if (const Status written = write_holder(fd.get(), path); !written) {
      ::unlink(path.c_str());
      return written.error();
    }
    return NameLock(std::move(fd), name);
  }
  return KVFERRY_ERROR(kBusy, "{} changed hands {} times while it was being locked", path.native(),
                       kMaxRounds);
}

NameLock& NameLock::operator=(NameLock&& other) noexcept {
  NameLock old(std::move(*this));
  fd_ = std::move(other.fd_);
  name_ = std::move(other.name_);
  home_ = other.home_;
  return *this;
}

NameLock::~NameLock() {
  // A forked child has a copy of this object, and no part in the name.
  if (!fd_.valid() || !home_.is_here()) return;
  try {
    remove_names(name_);
  } catch (...) {
    // Out of memory: a stale name is replaced later.
  }
}

bool NameLock::remove_if_stale(const std::filesystem::path& name) {
  const auto fd = open_lock(lock_path(name), 0);
  if (!fd) return false;
  if (is_empty(fd->get())) return remove_unwritten(name, fd->get());
  if (!is_free(fd->get(), kHeld)) {
    const std::optional<Holder> holder = read_holder(fd->get());
    if (!holder || !is_dead(*holder)) return false;
  }
  // Whoever locks it meanwhile finds it to be an old one, and leaves it to us.
  return remove_stale(name, fd->get());
}

std::vector<std::string> RuntimeDir::remove_stale_names() const { return NameLock::sweep(path_); }

Result<std::vector<HeldName>> RuntimeDir::held_names() const {
  std::vector<HeldName> held;
  std::error_code error;
  std::filesystem::directory_iterator entry(path_, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    const std::optional<std::string> name = locked_name(entry->path());
    if (!name) continue;
    const auto fd = open_lock(entry->path(), 0);
    if (!fd) {
      if (fd.error().code != ErrorCode::kNotFound) held.push_back({*name, 0});
      continue;
    }
    const std::optional<Holder> holder = read_holder(fd->get());
    // Free, or kept by a child of a dead holder: nobody's.
    if (is_free(fd->get(), kHeld) || (holder && is_dead(*holder))) continue;
    held.push_back({*name, holder ? holder->pid : 0});
  }
  if (error) {
    return KVFERRY_ERROR(kSystem, "{}: cannot be read: {}", path_.native(), error.message());
  }
  return held;
}

std::vector<std::string> NameLock::sweep(const std::filesystem::path& folder) {
  std::vector<std::string> removed;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    std::optional<std::string> name = locked_name(entry->path());
    if (name && remove_if_stale(folder / *name)) removed.push_back(*std::move(name));
  }
  if (error) log_warn("{}: cannot be read: {}", folder.native(), error.message());
  return removed;
}

}  // namespace kvferry::ipc
