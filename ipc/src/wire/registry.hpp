// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/log_gate.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <unordered_map>

namespace kvferry::ipc {

/// A process that has said a well-formed hello of our version, and what is known of it.
struct RegistryCandidate {
  PacketSocket socket;
  ProcessRef process;
  RegistryHello hello;
};

/// The first packet of a connection: kVersionMismatch, or kProtocol for what is no well-formed
/// hello of a process.
[[nodiscard]] Result<RegistryHello> read_registry_hello(std::span<const std::uint8_t> bytes);

/// Tells a candidate why not. The connection is then of no use any more.
void refuse_candidate(PacketSocket& socket, Error error);

/// The server's end of the registry up to the hello: accepts, identifies processes, bounds how many
/// may linger without a hello and for how long. @threading the loop's thread.
class Registry {
 public:
  using OnHello = std::function<void(RegistryCandidate)>;

  /// Throws Exception: a living server holds the name, the directory refuses.
  Registry(EventLoop& loop, const std::filesystem::path& path, OnHello on_hello);
  Registry(const Registry&) = delete;
  Registry& operator=(const Registry&) = delete;
  ~Registry();

  [[nodiscard]] std::uint64_t protocol_errors() const noexcept { return protocol_errors_; }

 private:
  struct Waiting {
    PacketSocket socket;
    ProcessRef process;
    TimerId timer = 0;
  };

  void accept();
  [[nodiscard]] Status check_room(const PacketSocket& socket) const;
  void add(PacketSocket socket);
  void on_packet(int fd);
  Waiting take(int fd);
  void pause_accepting(const Error& error);
  void warn(const Error& error);

  EventLoop& loop_;
  PacketListener listener_;
  OnHello on_hello_;
  bool accepting_ = true;
  TimerId accept_timer_ = 0;
  std::unordered_map<int, Waiting> waiting_;
  std::uint64_t protocol_errors_ = 0;
  LogGate gate_;
};

}  // namespace kvferry::ipc
