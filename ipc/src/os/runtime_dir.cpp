// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/runtime_dir.hpp"

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "os/socket_address.hpp"
#include "os/syscall.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>
#include <vector>

namespace kvferry::ipc {
namespace {

constexpr mode_t kPrivateMode = 0700;
constexpr mode_t kOthersMask = 0077;
constexpr mode_t kOthersWriteMask = 0022;
constexpr std::size_t kMaxInstanceChars = 32;
constexpr std::size_t kMaxLenderChars = 64;

/// The last one to leave holds the directory alone for the two calls that it takes to remove it.
constexpr Duration kLeaving = std::chrono::seconds(2);
constexpr Duration kLookAgain = std::chrono::milliseconds(1);

enum class DirKind { kBase, kInstance };

std::filesystem::path default_base() {
  if (std::string dir = environment("KVFERRY_RUNTIME_DIR"); !dir.empty()) return dir;
  if (std::string dir = environment("XDG_RUNTIME_DIR"); !dir.empty()) {
    return std::filesystem::path(dir) / "kvferry";
  }
  return fmt::format("/tmp/kvferry-{}", ::geteuid());
}

bool is_name(std::string_view name, std::size_t max_chars) {
  if (name.empty() || name.size() > max_chars || name == "." || name == "..") return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
}

Status check_directory(const std::filesystem::path& path, const struct stat& info, DirKind kind) {
  if (S_ISLNK(info.st_mode)) {
    return KVFERRY_ERROR(kPermission, "{} is a symbolic link; name the directory it points to",
                         path.native());
  }
  if (!S_ISDIR(info.st_mode)) {
    return KVFERRY_ERROR(kInvalidArgument, "{} is not a directory", path.native());
  }
  const uid_t self = ::geteuid();
  const mode_t mode = info.st_mode & 07777;
  const bool shared_base = kind == DirKind::kBase && info.st_uid == 0;
  if (info.st_uid != self && !shared_base) {
    return KVFERRY_ERROR(kPermission, "{} belongs to uid {}, not to {}; use another --runtime-dir",
                         path.native(), info.st_uid, self);
  }
  if (kind == DirKind::kBase) {
    // Others may look, and in a sticky directory even write: they cannot rename our part of it.
    if ((mode & kOthersWriteMask) != 0 && (mode & S_ISVTX) == 0) {
      return KVFERRY_ERROR(kPermission,
                           "{} has mode {:04o}: others can replace what lies in it; chmod go-w it "
                           "or use another --runtime-dir",
                           path.native(), mode);
    }
  } else if ((mode & kOthersMask) != 0) {
    return KVFERRY_ERROR(kPermission, "{} has mode {:04o}, expected 0700; chmod 0700 it",
                         path.native(), mode);
  }
  return ok();
}

// Created directories get their mode whatever the umask is; others are checked, never changed.
// kNotFound when somebody removed it right then.
Status make_directory(const std::filesystem::path& path, DirKind kind) {
  const bool created = ::mkdir(path.c_str(), kPrivateMode) == 0;
  if (!created && errno != EEXIST) {
    // An existing directory of a read-only file system also ends here on some file systems.
    const int mkdir_errno = errno;
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0) {
      errno = mkdir_errno;
      return KVFERRY_ERRNO("mkdir {}", path.native());
    }
  }
  // O_PATH needs no permission on the directory itself, which an odd umask may have taken away.
  const UniqueFd fd(
      retry_interrupted([&] { return ::open(path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC); }));
  struct stat info {};
  if (!fd.valid() && errno == ENOENT) {
    return KVFERRY_ERROR(kNotFound, "{} was removed meanwhile", path.native());
  }
  if (!fd.valid() || ::fstat(fd.get(), &info) != 0) {
    return KVFERRY_ERRNO("open directory {}", path.native());
  }
  if (created && info.st_uid == ::geteuid() && S_ISDIR(info.st_mode) &&
      (info.st_mode & 07777) != kPrivateMode) {
    const std::string self = fmt::format("/proc/self/fd/{}", fd.get());
    if (::chmod(self.c_str(), kPrivateMode) != 0 || ::fstat(fd.get(), &info) != 0) {
      return KVFERRY_ERRNO("chmod {}", path.native());
    }
  }
  return check_directory(path, info, kind);
}

Status make_parents(const std::filesystem::path& path) {
  std::filesystem::path made;
  for (const std::filesystem::path& part : path.parent_path()) {
    made /= part;
    std::error_code ignored;
    if (std::filesystem::exists(made, ignored)) continue;
    if (::mkdir(made.c_str(), kPrivateMode) != 0 && errno != EEXIST) {
      return KVFERRY_ERRNO("mkdir {}", made.native());
    }
  }
  return ok();
}

Status look_at_directory(const std::filesystem::path& path, DirKind kind) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) {
      return KVFERRY_ERROR(kNotFound, "{} is not there", path.native());
    }
    return KVFERRY_ERRNO("stat {}", path.native());
  }
  return check_directory(path, info, kind);
}

// Of the directory that has the name now, not of one that had it.
bool is_named(int fd, const std::filesystem::path& path) {
  struct stat held {};
  struct stat named {};
  return ::fstat(fd, &held) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         held.st_ino == named.st_ino && held.st_dev == named.st_dev;
}

}  // namespace

class RuntimeDir::Hold {
 public:
  /// kNotFound when the directory was removed meanwhile: make it again.
  static Result<std::shared_ptr<const Hold>> take(const std::filesystem::path& path) {
    const Deadline deadline = Deadline::after(kLeaving);
    while (true) {
      UniqueFd fd(retry_interrupted(
          [&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }));
      if (!fd.valid()) {
        if (errno == ENOENT) return KVFERRY_ERROR(kNotFound, "{} is not there", path.native());
        return KVFERRY_ERRNO("open directory {}", path.native());
      }
      if (::flock(fd.get(), LOCK_SH | LOCK_NB) == 0) {
        if (!is_named(fd.get(), path)) continue;
        return std::make_shared<const Hold>(std::move(fd), path);
      }
      if (errno != EWOULDBLOCK && errno != EINTR) {
        return KVFERRY_ERRNO("lock directory {}", path.native());
      }
      if (deadline.expired()) {
        return KVFERRY_ERROR(kBusy, "{} is being removed by another process, for over {} ms now",
                             path.native(), kLeaving / kLookAgain);
      }
      // wait: another process to remove the directory; kLookAgain, together kLeaving; nothing
      ::poll(nullptr, 0, Deadline::after(kLookAgain).poll_timeout_ms());
    }
  }

  Hold(UniqueFd fd, std::filesystem::path path) : fd_(std::move(fd)), path_(std::move(path)) {}
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  ~Hold() {
    // A child shares the lock itself: what it does to it, it does to its parent's.
    if (!home_.is_here()) return;
    // Alone, and it still has the name: nobody can take it or be in it meanwhile.
    const int alone = retry_interrupted([this] { return ::flock(fd_.get(), LOCK_EX | LOCK_NB); });
    if (alone != 0 || !is_named(fd_.get(), path_)) return;
    try {
      // Whoever wrote there has ended. Not deep, and never through a link.
      const std::filesystem::path folder = path_ / "transitions";
      std::error_code ignored;
      if (std::filesystem::is_directory(std::filesystem::symlink_status(folder, ignored))) {
        for (const auto& ring : std::filesystem::directory_iterator(folder, ignored)) {
          (void)::unlink(ring.path().c_str());
        }
        (void)::rmdir(folder.c_str());
      }
      (void)NameLock::sweep(path_);
      remove_lockless_sockets();
      if (::rmdir(path_.c_str()) == 0 || errno == ENOTEMPTY || errno == EEXIST) return;
      log_debug("{}", KVFERRY_ERRNO("rmdir {}", path_.native()).to_string());
    } catch (...) {
      // Out of memory: an empty directory stays.
    }
  }

 private:
  // Of killed managers and workers: a control socket is under the lock of the registry beside it.
  void remove_lockless_sockets() const {
    std::error_code ignored;
    std::vector<std::filesystem::path> found;
    const auto is_control = [](const std::filesystem::path& path) {
      const std::string kind = path.extension().string();
      return path.filename() == kControl || kind == std::string(".").append(kStepControl) ||
             kind == std::string(".").append(kGenerateControl);
    };
    for (const auto& entry : std::filesystem::directory_iterator(path_, ignored)) {
      if (is_control(entry.path())) found.push_back(entry.path());
    }
    for (const auto& path : found) (void)remove_stale_socket(path);
  }

  HomeProcess home_;
  UniqueFd fd_;
  std::filesystem::path path_;
};

Result<std::shared_ptr<const RuntimeDir::Hold>> RuntimeDir::make_and_hold(
    const std::filesystem::path& path) {
  KVFERRY_TRY(make_directory(path, DirKind::kInstance));
  return Hold::take(path);
}

Result<std::filesystem::path> RuntimeDir::base_path(std::string_view base) {
  std::error_code error;
  std::filesystem::path path =
      std::filesystem::absolute(base.empty() ? default_base() : std::filesystem::path(base), error)
          .lexically_normal();
  if (error) {
    return KVFERRY_ERROR(kInvalidArgument, "runtime directory \"{}\": {}", base, error.message());
  }
  return path.has_filename() ? path : path.parent_path();
}

Result<std::vector<std::string>> RuntimeDir::instances(std::string_view base) {
  KVFERRY_ASSIGN(const std::filesystem::path path, base_path(base));
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator at(path, error), end; !error && at != end;
       at.increment(error)) {
    const std::string name = at->path().filename();
    std::error_code ignored;
    if (is_name(name, kMaxInstanceChars) && at->is_directory(ignored)) names.push_back(name);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return KVFERRY_ERROR(kSystem, "{}: {}", path.native(), error.message());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Result<RuntimeDir> RuntimeDir::name(std::string_view base, std::string_view instance) {
  if (!is_name(instance, kMaxInstanceChars)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "instance name \"{}\" must be 1 to {} characters of [A-Za-z0-9._-]",
                         instance, kMaxInstanceChars);
  }
  KVFERRY_ASSIGN(const std::filesystem::path parent, base_path(base));
  RuntimeDir dir;
  dir.instance_ = std::string(instance);
  dir.path_ = parent / dir.instance_;
  // The longest fixed name; names of ranks are checked when their socket is made.
  KVFERRY_TRY(make_socket_address(dir.registry_socket()));
  return dir;
}

Result<RuntimeDir> RuntimeDir::open(std::string_view base, std::string_view instance) {
  KVFERRY_TRY(check_own_proc());
  KVFERRY_ASSIGN(RuntimeDir dir, name(base, instance));
  const std::filesystem::path base_path = dir.path_.parent_path();
  // Each round is one process that left, the last one in there, after we had looked.
  constexpr int kMaxRounds = 100;
  for (int round = 0; round < kMaxRounds; ++round) {
    KVFERRY_TRY(make_parents(base_path));
    KVFERRY_TRY(make_directory(base_path, DirKind::kBase));
    auto hold = make_and_hold(dir.path_);
    if (hold) {
      dir.hold_ = *std::move(hold);
      return dir;
    }
    if (hold.error().code != ErrorCode::kNotFound) return std::move(hold).error();
  }
  return KVFERRY_ERROR(kBusy, "{} was removed {} times while it was being opened",
                       dir.path_.native(), kMaxRounds);
}

Result<RuntimeDir> RuntimeDir::find(std::string_view base, std::string_view instance) {
  KVFERRY_TRY(check_own_proc());
  KVFERRY_ASSIGN(RuntimeDir dir, name(base, instance));
  KVFERRY_TRY(look_at_directory(dir.path_.parent_path(), DirKind::kBase));
  KVFERRY_TRY(look_at_directory(dir.path_, DirKind::kInstance));
  return dir;
}

std::filesystem::path RuntimeDir::rank_socket(std::string_view engine,
                                              std::uint32_t rank,
                                              std::string_view kind) const {
  return path_ / fmt::format("{}.{}.{}", engine, rank, kind);
}

Result<std::filesystem::path> RuntimeDir::weights_socket(std::string_view name) const {
  if (!is_name(name, kMaxLenderChars)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "name \"{}\" of a process that lends weights must be 1 to {} characters "
                         "of [A-Za-z0-9._-]",
                         name.substr(0, kMaxLenderChars), kMaxLenderChars);
  }
  return path_ / fmt::format("{}.weights", name);
}

}  // namespace kvferry::ipc
