// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <filesystem>

namespace kvferry::ipc {

/// kInvalidArgument for a path that does not fit (107 bytes).
inline Result<sockaddr_un> make_socket_address(const std::filesystem::path& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string& text = path.native();
  constexpr std::size_t kMaxBytes = sizeof(address.sun_path) - 1;
  if (text.empty() || text.size() > kMaxBytes || text.find('\0') != std::string::npos) {
    return KVFERRY_ERROR(kInvalidArgument,
                         "socket path \"{}\" has {} bytes, allowed are 1 to {}; choose a shorter "
                         "--runtime-dir or instance",
                         text, text.size(), kMaxBytes);
  }
  std::memcpy(&address.sun_path[0], text.data(), text.size());
  return address;
}

inline const sockaddr* as_sockaddr(const sockaddr_un& address) noexcept {
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): the sockets interface.
  return reinterpret_cast<const sockaddr*>(&address);
}

/// Removes a stale socket file. Anything else under that name is refused, never removed.
[[nodiscard]] Status remove_stale_socket(const std::filesystem::path& path);

/// A listening socket of the type (SOCK_STREAM, SOCK_SEQPACKET) on the path, mode 0600 whatever the
/// umask is. The caller holds the path's NameLock.
[[nodiscard]] Result<UniqueFd> listen_on_path(const std::filesystem::path& path, int type);

}  // namespace kvferry::ipc
