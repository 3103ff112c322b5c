// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Helper of the OS layer's multi-process tests: holds what it is told to hold until it dies.
//   lock NAME | listen PATH | connect PATH [UID]
// "fork" makes the first two fork a child that outlives them and ends with its stdin.
#include "kvferry/ipc/os/packet_socket.hpp"
#include "support/child_side.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>

namespace {

using kvferry::test::hear;
using kvferry::test::say;
namespace ipc = kvferry::ipc;

template <typename T> bool report(const ipc::Result<T>& result) {
  say(result ? "ok" : result.error().to_string());
  return result.has_value();
}

// A child that keeps every descriptor. It answers to the same pipes, so that the test sees it
// start, and ends when the test closes them; leaving main, it destroys its copy of what is held.
void fork_keeper() {
  const pid_t child = ::fork();
  if (child == 0) say(fmt::format("keeper {}", ::getpid()));
}

int hold_lock(const char* name) {
  const auto lock = ipc::NameLock::acquire(name);
  if (!report(lock)) return 1;
  while (const auto line = hear()) {
    if (*line == "fork") fork_keeper();
  }
  return 0;
}

int hold_listener(const char* path) {
  const auto listener = ipc::PacketListener::listen(path);
  if (!report(listener)) return 1;
  while (const auto line = hear()) {
    if (*line == "fork") fork_keeper();
  }
  return 0;
}

int hold_connection(const char* path) {
  auto socket = ipc::PacketSocket::connect(path, ipc::Deadline::after(std::chrono::seconds(20)));
  if (!report(socket)) return 1;
  while (const auto line = hear()) {
    if (*line == "close") *socket = ipc::PacketSocket();
    if (*line == "wait end") {
      const auto end = socket->receive(ipc::Deadline::after(std::chrono::seconds(20)));
      say(end ? "packet" : std::string(to_string(end.error().code)));
      continue;
    }
    say("done");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  kvferry::test::disable_core_dumps();
  const std::string mode = argc > 1 ? argv[1] : "";
  if (argc > 3 && ::setuid(static_cast<uid_t>(std::atoi(argv[3]))) != 0) return 2;
  if (mode == "lock") return hold_lock(argv[2]);
  if (mode == "listen") return hold_listener(argv[2]);
  if (mode == "connect") return hold_connection(argv[2]);
  return 2;
}
