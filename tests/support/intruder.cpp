// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A process that comes to a socket as it should not, with bare system calls:
//   intruder knock UID PATH    connects as that user and waits for what it gets: "refused ERRNO",
//                              "closed", or "answered BYTES"
//   intruder flood PATH COUNT silent|hello|garbage
//                              connects so many times, with nothing, a registry's hello or garbage
//                              on each, keeps all that it can, and says "flooded CONNECTED CLOSED";
//                              stays until stdin ends
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/wire/messages.hpp"
#include "support/child_side.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

namespace ipc = kvferry::ipc;
using kvferry::test::say;

// Of whichever type the socket there is.
ipc::UniqueFd connect_to(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof(address.sun_path) - 1));
  for (const int type : {SOCK_SEQPACKET, SOCK_STREAM}) {
    ipc::UniqueFd fd(::socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    if (!fd.valid()) break;
    const auto* name = reinterpret_cast<const sockaddr*>(&address);
    if (::connect(fd.get(), name, sizeof(address)) == 0) return fd;
    if (errno != EPROTOTYPE) break;
  }
  return {};
}

// Bytes that came, 0 at the end of the connection; -1 while there is neither.
ssize_t receive(int fd, int milliseconds) {
  pollfd waited{fd, POLLIN, 0};
  if (::poll(&waited, 1, milliseconds) != 1) return -1;
  std::array<char, 4096> buffer{};
  return std::max<ssize_t>(0, ::recv(fd, buffer.data(), buffer.size(), 0));
}

int knock(const std::string& user, const std::string& path) {
  if (::setgid(static_cast<gid_t>(std::stoul(user))) != 0 ||
      ::setuid(static_cast<uid_t>(std::stoul(user))) != 0) {
    return 2;
  }
  const ipc::UniqueFd fd = connect_to(path);
  if (!fd.valid()) {
    say(fmt::format("refused {}", errno));
    return 0;
  }
  constexpr int kLong = 20'000;
  const ssize_t size = receive(fd.get(), kLong);
  say(size == 0 ? "closed" : fmt::format("answered {}", size));
  return 0;
}

ipc::Bytes hello() {
  ipc::RegistryHello hello;
  hello.kind = ipc::ProcessKind::kEngine;
  hello.incarnation = ipc::Digest::random();
  hello.name = "intruder";
  return ipc::encode(hello);
}

ipc::Bytes garbage(std::mt19937_64& random) {
  ipc::Bytes bytes(1 + random() % 500);
  for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
  return bytes;
}

int flood(const std::string& path, int count, const std::string& mode) {
  rlimit limit{};
  (void)::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
  std::mt19937_64 random(1);
  std::vector<ipc::UniqueFd> open;
  int connected = 0;
  int closed = 0;
  for (int i = 0; i < count; ++i) {
    ipc::UniqueFd fd = connect_to(path);
    if (!fd.valid()) continue;
    ++connected;
    if (mode != "silent") {
      const ipc::Bytes bytes = mode == "hello" ? hello() : garbage(random);
      (void)::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    }
    open.push_back(std::move(fd));
    if (i % 64 != 0) continue;
    closed += static_cast<int>(std::erase_if(
        open, [](const ipc::UniqueFd& connection) { return receive(connection.get(), 0) == 0; }));
  }
  say(fmt::format("flooded {} {}", connected, closed));
  while (kvferry::test::hear()) {
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 3 && arguments[0] == "knock") return knock(arguments[1], arguments[2]);
  if (arguments.size() == 4 && arguments[0] == "flood") {
    return flood(arguments[1], std::stoi(arguments[2]), arguments[3]);
  }
  return 2;
}
