// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "wire/registry.hpp"

#include "kvferry/ipc/base/log.hpp"
#include "wire/wire_version.hpp"

#include <fmt/format.h>

#include <chrono>
#include <utility>

namespace kvferry::ipc {
namespace {

constexpr std::size_t kMaxWaiting = 64;
constexpr std::size_t kMaxNameBytes = 256;
constexpr auto kHelloTime = std::chrono::seconds(5);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);

PacketListener listen_or_throw(const std::filesystem::path& path) {
  auto listener = PacketListener::listen(path);
  if (!listener) throw Exception(std::move(listener).error());
  return std::move(listener).value();
}

Result<RegistryHello> read_hello(const Packet& packet) {
  const auto version = peek_wire_version(packet.bytes);
  if (version && *version != kWireVersion) {
    return KVFERRY_ERROR(kVersionMismatch,
                         "peer speaks wire version {}, this process {}; update the older side",
                         *version, kWireVersion);
  }
  KVFERRY_ASSIGN(RegistryHello hello, decode<RegistryHello>(packet.bytes, "registry hello"));
  if (hello.incarnation.is_zero()) {
    return KVFERRY_ERROR(kProtocol, "registry hello of \"{}\" has no incarnation", hello.name);
  }
  if (hello.name.size() > kMaxNameBytes) {
    return KVFERRY_ERROR(kProtocol, "registry hello has a name of {} bytes, {} are allowed",
                         hello.name.size(), kMaxNameBytes);
  }
  return hello;
}

}  // namespace

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
  for (;;) {
    auto socket = listener_.try_accept();
    if (!socket) {
      pause_accepting(socket.error());
      return;
    }
    if (!socket->has_value()) return;
    add(std::move(**socket));
  }
}

void Registry::add(PacketSocket socket) {
  if (waiting_.size() >= kMaxWaiting) {
    const Error error =
        KVFERRY_ERROR(kBusy, "{} connections have not said hello yet", waiting_.size());
    warn(error);
    refuse_candidate(socket, error);
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
  auto hello = read_hello(**packet);
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
