// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/runtime_dir.hpp"

#include "kvferry/ipc/os/process.hpp"
#include "os/socket_address.hpp"
#include "os/syscall.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr mode_t kPrivateMode = 0700;
constexpr mode_t kOthersMask = 0077;
constexpr mode_t kOthersWriteMask = 0022;
constexpr std::size_t kMaxInstanceChars = 32;

enum class DirKind { kBase, kInstance };

std::filesystem::path default_base() {
  if (std::string dir = environment("KVFERRY_RUNTIME_DIR"); !dir.empty()) return dir;
  if (std::string dir = environment("XDG_RUNTIME_DIR"); !dir.empty()) {
    return std::filesystem::path(dir) / "kvferry";
  }
  return fmt::format("/tmp/kvferry-{}", ::geteuid());
}

bool is_instance_name(std::string_view name) {
  if (name.empty() || name.size() > kMaxInstanceChars || name == "." || name == "..") return false;
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

}  // namespace

Result<RuntimeDir> RuntimeDir::open(std::string_view base, std::string_view instance) {
  if (!is_instance_name(instance)) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "instance name \"{}\" must be 1 to {} characters of [A-Za-z0-9._-]",
                         instance, kMaxInstanceChars);
  }
  std::error_code error;
  std::filesystem::path base_path =
      std::filesystem::absolute(base.empty() ? default_base() : std::filesystem::path(base), error)
          .lexically_normal();
  if (error) {
    return KVFERRY_ERROR(kInvalidArgument, "runtime directory \"{}\": {}", base, error.message());
  }
  if (!base_path.has_filename()) base_path = base_path.parent_path();

  RuntimeDir dir;
  dir.instance_ = std::string(instance);
  dir.path_ = base_path / dir.instance_;
  // The longest fixed name; names of ranks are checked when their socket is made.
  KVFERRY_TRY(make_socket_address(dir.registry_socket()));

  KVFERRY_TRY(make_parents(base_path));
  KVFERRY_TRY(make_directory(base_path, DirKind::kBase));
  KVFERRY_TRY(make_directory(dir.path_, DirKind::kInstance));
  return dir;
}

std::filesystem::path RuntimeDir::rank_socket(std::string_view engine,
                                              std::uint32_t rank,
                                              std::string_view kind) const {
  return path_ / fmt::format("{}.{}.{}", engine, rank, kind);
}

}  // namespace kvferry::ipc
