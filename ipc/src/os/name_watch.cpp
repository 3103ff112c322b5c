// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/name_watch.hpp"

#include <sys/inotify.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvferry::ipc {

Result<NameWatch> NameWatch::open(const std::filesystem::path& path) {
  UniqueFd fd(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  if (!fd.valid()) return KVFERRY_ERRNO("inotify_init1");
  const std::string directory = path.parent_path().native();
  constexpr std::uint32_t kEvents = IN_CREATE | IN_MOVED_TO | IN_MOVE_SELF | IN_ONLYDIR;
  if (::inotify_add_watch(fd.get(), directory.c_str(), kEvents) < 0) {
    if (errno == ENOENT) return KVFERRY_ERROR(kNotFound, "{} is not there", directory);
    return KVFERRY_ERRNO("inotify_add_watch of {}", directory);
  }
  return NameWatch(std::move(fd), path.filename().native());
}

bool NameWatch::drain() {
  bool seen = false;
  alignas(inotify_event) std::array<std::byte, 4096> buffer{};
  for (;;) {
    // wait-none: inotify, IN_NONBLOCK
    const ssize_t size = ::read(fd_.get(), buffer.data(), buffer.size());
    if (size <= 0) return seen;
    std::size_t at = 0;
    while (at + sizeof(inotify_event) <= static_cast<std::size_t>(size)) {
      inotify_event event{};
      std::memcpy(&event, buffer.data() + at, sizeof(event));
      at += sizeof(event);
      // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): the kernel's NUL-padded name.
      const auto* name = reinterpret_cast<const char*>(buffer.data() + at);
      if ((event.mask & IN_Q_OVERFLOW) != 0) seen = true;
      // IN_IGNORED: the kernel dropped the watch, for the directory is gone.
      if ((event.mask & (IN_IGNORED | IN_MOVE_SELF)) != 0) over_ = true;
      if (event.len > 0 && name_ == name) seen = true;
      at += event.len;
    }
  }
}

}  // namespace kvferry::ipc
