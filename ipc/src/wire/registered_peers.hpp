// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "wire/peer_outbox.hpp"
#include "wire/protocol_errors.hpp"
#include "wire/registry.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace kvferry::ipc {

/// A process from its hello to its proven death, or to the end of its connection when it is
/// leaving.
struct RegisteredPeer {
  Peer peer;
  PacketSocket registry;  ///< Invalid once closed.
  ProcessRef process;
  PeerOutbox outbox;
  bool present = false;      ///< Its first message came: the handler knows it.
  bool ring_posted = false;  ///< Another round of its ring will come by itself.
  bool spoken = false;       ///< It has sent more than that.
  bool silent = false;
  bool leaving = false;  ///< Goes with its connection.
  bool dead = false;
  bool dying = false;              ///< Dead, but its last messages are still coming in.
  std::uint64_t last_message = 0;  ///< Which one of all that came was its last.
  TimerId timer = 0;               ///< Until present, then from the end of file until silent.

  [[nodiscard]] bool can_be_sent_to() const noexcept { return present && !dead; }
};

/// The processes that are registered with a control server: who is let in, whose connection has
/// ended, who is dead. Two living processes never share an incarnation.
/// @threading the loop's thread.
class RegisteredPeers {
 public:
  struct Hooks {
    /// Closed its registry connection, but may be alive.
    std::function<void(const Peer&)> on_silent;
    /// The kernel proved it dead, once; the hook may remove() it.
    std::function<void(RegisteredPeer&)> on_dying;
    /// Was leaving, or had said nothing yet, and has closed its connection.
    std::function<void(const Peer&)> on_left;
    /// It put messages into its ring, or may have before it closed its connection.
    std::function<void(RegisteredPeer&)> on_bell;
  };
  using Map = std::unordered_map<IncarnationId, std::unique_ptr<RegisteredPeer>>;

  /// options and errors outlive it.
  RegisteredPeers(EventLoop& loop,
                  const ControlServer::Options& options,
                  ProtocolErrors& errors,
                  Hooks hooks);
  RegisteredPeers(const RegisteredPeers&) = delete;
  RegisteredPeers& operator=(const RegisteredPeers&) = delete;
  ~RegisteredPeers();

  /// Welcomes a process or refuses it.
  void on_hello(RegistryCandidate candidate);
  /// Its first message came in time.
  void set_present(RegisteredPeer& peer);
  void remove(const IncarnationId& id);
  void remove_when_closed(RegisteredPeer& peer);

  /// Null when unknown.
  [[nodiscard]] RegisteredPeer* find(const IncarnationId& id) const;
  /// Was here a while ago: its last messages may still come in.
  [[nodiscard]] bool has_departed(const IncarnationId& id) const { return departed_.contains(id); }
  [[nodiscard]] const Map& all() const noexcept { return peers_; }
  /// Readable when a peer whose queue was full may have room again.
  [[nodiscard]] const EventFd& writable() const noexcept { return *writable_; }

 private:
  [[nodiscard]] static bool goes_with_its_connection(const RegisteredPeer& peer) noexcept;
  [[nodiscard]] std::optional<Error> check_duplicate(const IncarnationId& id,
                                                     const ProcessRef& process,
                                                     ReplyCache& replies);
  [[nodiscard]] Status check_room(const ProcessRef& process) const;
  [[nodiscard]] std::optional<MessageChannel::Made> make_channel(const RegistryHello& hello);
  void on_registry(const IncarnationId& id);
  void on_silence(const IncarnationId& id);
  void on_absent(const IncarnationId& id);
  void on_death(const IncarnationId& id);
  void forget(RegisteredPeer& peer);

  EventLoop& loop_;
  const ControlServer::Options& options_;
  ProtocolErrors& errors_;
  Hooks hooks_;
  std::shared_ptr<EventFd> writable_ = std::make_shared<EventFd>();  // shared with the queues
  std::uint64_t last_connection_ = 0;
  Map peers_;
  std::unordered_set<IncarnationId> departed_;
};

}  // namespace kvferry::ipc
