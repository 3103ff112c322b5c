// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/registry.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "kvferry/ipc/os/descriptors.hpp"
#include "wire/wire_version.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kMaxWaiting = 64;
constexpr std::ptrdiff_t kMaxWaitingOfProcess = 32;
// Connections taken in one go, so that a flood of them does not hold up what else the loop does.
constexpr int kAcceptsPerRound = 32;
constexpr std::size_t kMaxNameBytes = 256;
constexpr auto kHelloTime = std::chrono::seconds(5);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

PacketListener listen_or_throw(const std::filesystem::path& path) {
  auto listener = PacketListener::listen(path);
  if (!listener) throw Exception(std::move(listener).error());
  return std::move(listener).value();
}

}  // namespace

Result<RegistryHello> read_registry_hello(std::span<const std::uint8_t> bytes) {
  KVFERRY_ASSIGN(RegistryHello hello,
                 decode_versioned<RegistryHello>(bytes, "registry hello", "the peer"));
  if (hello.incarnation.is_zero()) {
    return KVFERRY_ERROR(kProtocol, "registry hello of \"{}\" has no incarnation", hello.name);
  }
  if (hello.name.size() > kMaxNameBytes) {
    return KVFERRY_ERROR(kProtocol, "registry hello has a name of {} bytes, {} are allowed",
                         hello.name.size(), kMaxNameBytes);
  }
  return hello;
}

void refuse_candidate(PacketSocket& socket, Error error) {
  RegistryWelcome welcome;
  welcome.refused = std::move(error);
  if (const Status sent = socket.send(encode(welcome)); !sent) {
    log_debug("refusal not delivered: {}", sent.error().to_string());
  }
}

Registry::Registry(EventLoop& loop, const std::filesystem::path& path, OnHello on_hello)
    : loop_(loop), listener_(listen_or_throw(path)), on_hello_(std::move(on_hello)) {
  loop_.watch(listener_.fd(), [this] { accept(); });
}

Registry::~Registry() {
  if (accepting_) {
    loop_.unwatch(listener_.fd());
  } else {
    loop_.cancel(accept_timer_);
  }
  for (auto& [fd, waiting] : waiting_) {
    loop_.unwatch(fd);
    loop_.cancel(waiting.timer);
  }
}

void Registry::accept() {
  for (int i = 0; i < kAcceptsPerRound; ++i) {
    auto socket = listener_.try_accept();
    if (!socket) {
      pause_accepting(socket.error());
      return;
    }
    if (!socket->has_value()) return;
    add(std::move(**socket));
  }
}

Status Registry::check_room(const PacketSocket& socket) const {
  if (waiting_.size() >= kMaxWaiting) {
    return KVFERRY_ERROR(kBusy, "{} connections have not said hello yet", waiting_.size());
  }
  const pid_t pid = socket.peer_pid();
  const auto of_process = std::count_if(waiting_.begin(), waiting_.end(), [pid](const auto& entry) {
    return entry.second.process.pid() == pid;
  });
  if (of_process >= kMaxWaitingOfProcess) {
    return KVFERRY_ERROR(kBusy, "{} connections of process {} have not said hello yet", of_process,
                         pid);
  }
  return need_descriptors(1);
}

void Registry::add(PacketSocket socket) {
  if (Status room = check_room(socket); !room) {
    warn(room.error());
    refuse_candidate(socket, std::move(room).error());
    return;
  }
  auto process = socket.peer();
  if (!process) {
    warn(process.error());
    refuse_candidate(socket, std::move(process).error());
    return;
  }
  const int fd = socket.fd();
  const TimerId timer = loop_.after(kHelloTime, [this, fd] {
    const Waiting late = take(fd);
    ++protocol_errors_;
    warn(KVFERRY_ERROR(kTimeout, "process {} connected and said no hello for {} s",
                       late.process.pid(), kHelloTime.count()));
  });
  waiting_.emplace(fd, Waiting{std::move(socket), std::move(process).value(), timer});
  loop_.watch(fd, [this, fd] { on_packet(fd); });
  on_packet(fd);  // Who said hello at once does not count as waiting.
}

void Registry::on_packet(int fd) {
  auto packet = waiting_.at(fd).socket.try_receive();
  if (packet && !packet->has_value()) return;
  Waiting peer = take(fd);
  if (!packet) {
    // Closed without a word: somebody looked whether we live.
    if (packet.error().code == ErrorCode::kPeerDied) return;
    ++protocol_errors_;
    warn(packet.error());
    return;
  }
  auto hello = read_registry_hello((*packet)->bytes);
  if (!hello) {
    ++protocol_errors_;
    warn(hello.error());
    refuse_candidate(peer.socket, std::move(hello).error());
    return;
  }
  on_hello_(
      RegistryCandidate{std::move(peer.socket), std::move(peer.process), std::move(hello).value()});
}

Registry::Waiting Registry::take(int fd) {
  loop_.unwatch(fd);
  auto node = waiting_.extract(fd);
  loop_.cancel(node.mapped().timer);
  return std::move(node.mapped());
}

// Out of descriptors: the connection stays in the backlog, and trying again at once would spin.
void Registry::pause_accepting(const Error& error) {
  warn(error);
  loop_.unwatch(listener_.fd());
  accepting_ = false;
  accept_timer_ = loop_.after(kAcceptPause, [this] {
    loop_.watch(listener_.fd(), [this] { accept(); });
    accepting_ = true;
  });
}

void Registry::warn(const Error& error) {
  std::uint64_t suppressed = 0;
  if (gate_.open(suppressed)) {
    log_warn("registry: {} ({} more like it)", error.to_string(), suppressed);
  }
}

}  // namespace kvferry::ipc
