// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/clock.hpp"
#include "kvferry/ipc/base/ids.hpp"
#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/pool_memory.hpp"
#include "kvferry/ipc/os/process.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/messages.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

/// The control plane: a registry (SEQPACKET: uid check, pidfd, descriptors) and a ZeroMQ
/// ROUTER/DEALER pair for messages. Used between the manager and its peers, and between an engine
/// and its workers' step channels. A peer that wants them has rings in shared memory, too, one to
/// each direction: small messages go through them, woken by a bell on the registry's connection
/// only when the other side sleeps, and all messages keep one order.
///
/// A peer says hello on the registry (RegistryHello, RegistryWelcome), then sends an empty message,
/// which the server echoes: from then on, and not before, it is a peer of the handler and either
/// side may send. Messages between two living processes are neither lost nor reordered; there are
/// no heartbeats, a stopped process is merely late. Death is what pidfds say.
namespace kvferry::ipc {

struct Peer {
  IncarnationId id;
  ProcessKind kind = ProcessKind::kOperator;
  std::string name;
  pid_t pid = 0;
};

/// Events of a ControlServer, on its loop's thread.
class ControlHandler {
 public:
  virtual ~ControlHandler() = default;
  virtual void on_peer(const Peer& peer) = 0;
  /// Request, reply or event of a registered peer. Malformed envelopes never get here.
  virtual void on_message(const Peer& peer, Envelope envelope) = 0;
  /// Closed its registry connection but may be alive: an alarm, never a proof.
  virtual void on_peer_silent(const Peer& peer) = 0;
  /// The kernel proved it dead. Comes after the messages that it had sent.
  virtual void on_peer_died(const Peer& peer) = 0;
  /// Its connection is closed, and either forget_when_closed() was asked for it or it is no mover
  /// and had sent nothing: it is forgotten, and its death will not be told.
  virtual void on_peer_left(const Peer& /*peer*/) {}
  /// A send to it was kBusy, and there is room again.
  virtual void on_peer_writable(const Peer& /*peer*/) {}
};

/// The manager's side (and a worker's, for steps). @threading the loop's thread only.
class ControlServer {
 public:
  struct Options {
    std::filesystem::path registry_path;
    std::filesystem::path control_path;
    SessionId session;
    int pool_fd = -1;  ///< Given to movers, as are the following.
    std::uint64_t pool_bytes = 0;
    Digest pool;
    int catalogue_fd = -1;  ///< With a pool only.
    std::uint64_t catalogue_bytes = 0;
    int table_fd = -1;  ///< The prefix table's, given to engines.
    std::uint64_t table_bytes = 0;
    /// Per peer, unsent; beyond one of them send() is kBusy. An empty queue takes any message.
    int max_queued_messages = 10'000;
    std::size_t max_queued_bytes = std::size_t{256} << 20;
    /// Per peer, read ahead of the handler: the rest waits on the peer's side. With kMaxWireBytes
    /// this bounds what a peer can make the server hold.
    int max_unread_messages = 32;
  };

  /// Throws Exception: a living server holds the name (kAlreadyExists), the directory refuses.
  ControlServer(EventLoop& loop, Options options, ControlHandler& handler);
  ControlServer(const ControlServer&) = delete;
  ControlServer& operator=(const ControlServer&) = delete;
  ~ControlServer();

  /// kNotFound for an unknown or gone peer, kBusy when its queue is full, kInvalidArgument beyond
  /// kMaxWireBytes. Never blocks.
  [[nodiscard]] Status send(const IncarnationId& peer, const Envelope& envelope);
  /// The latest 64 replies to a peer (8 MiB of them, and always the latest) are remembered for as
  /// long as its process lives or until it is forgotten, over reconnects of the same incarnation,
  /// too: a repeated request gets the same answer. One that is older than all of them is refused as
  /// kStaleEpoch. So no repeat ever reaches the handler. What a full queue did not take is sent
  /// when there is room.
  template <typename T>
  Status reply(const IncarnationId& peer, const Envelope& request, const T& body) {
    return send_reply(peer, request, std::nullopt, encode(body));
  }
  Status reply_error(const IncarnationId& peer, const Envelope& request, Error error) {
    return send_reply(peer, request, std::move(error), {});
  }
  /// A command that failed in part: what was reached, and the first error.
  template <typename T>
  Status reply_partial(const IncarnationId& peer,
                       const Envelope& request,
                       const T& body,
                       const Error& error) {
    return send_reply(peer, request, error, encode(body));
  }
  template <typename T> Status notify(const IncarnationId& peer, MessageKind kind, const T& body) {
    Envelope envelope;
    envelope.kind = kind;
    envelope.body = encode(body);
    return send(peer, envelope);
  }
  /// For a peer that said bye and holds nothing that only its death gives back: once its connection
  /// is closed it is forgotten and on_peer_left() comes, so that a process may come under new names
  /// for as long as it lives. Not from within on_peer_left() or on_peer_died(). Unknown: nothing.
  void forget_when_closed(const IncarnationId& peer);
  /// The process behind a peer, for proof of death and for signals; null when unknown.
  [[nodiscard]] const ProcessRef* process(const IncarnationId& peer) const;
  [[nodiscard]] std::uint64_t protocol_errors() const noexcept;

 private:
  Status send_reply(const IncarnationId& peer,
                    const Envelope& request,
                    std::optional<Error> error,
                    Bytes body);
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// A peer's side. @threading one thread at a time (not tied to one).
class ControlLink {
 public:
  struct Options {
    std::filesystem::path registry_path;
    std::filesystem::path control_path;
    ProcessKind kind = ProcessKind::kOperator;
    IncarnationId incarnation;  ///< This life of this process.
    std::string name;
    /// Messages through shared memory: a few microseconds to the other side, for 260 KiB of memory.
    bool rings = true;
  };

  /// kNoManager when nobody listens (also: stale name), kVersionMismatch, kTimeout.
  [[nodiscard]] static Result<std::unique_ptr<ControlLink>> connect(Options options,
                                                                    Deadline deadline);
  ControlLink(const ControlLink&) = delete;
  ControlLink& operator=(const ControlLink&) = delete;
  ~ControlLink();

  [[nodiscard]] const RegistryWelcome& welcome() const noexcept;
  /// The descriptor of the pool (movers), or of the prefix table (engines); invalid otherwise or
  /// when taken.
  [[nodiscard]] UniqueFd take_memory_fd();
  /// The same of a mover's, with the catalogue of what is in it.
  [[nodiscard]] PoolMemory take_pool();
  [[nodiscard]] const ProcessRef& server() const noexcept;

  /// For an EventLoop: readable when try_receive() may have something, or when the server ended
  /// (server_lost(); it then stays readable: unwatch it). After a callback, call try_receive()
  /// until it is empty.
  [[nodiscard]] int fd() const noexcept;
  [[nodiscard]] bool server_lost() const noexcept;

  /// kBusy when the queue is full, kPeerDied when the server is gone, kInvalidArgument beyond
  /// kMaxWireBytes.
  [[nodiscard]] Status send(const Envelope& envelope);
  /// Nothing when no message waits; kProtocol or kVersionMismatch for one that was dropped.
  [[nodiscard]] Result<std::optional<Envelope>> try_receive();

  /// Fresh request ids, unique in this link's incarnation. They grow, and requests have to be sent
  /// in their order.
  [[nodiscard]] RequestId next_request() noexcept;
  /// Sends a request and waits for its reply; other messages that arrive are kept for
  /// try_receive(). A reply's error is returned as such. kTimeout names kind and server.
  [[nodiscard]] Result<Envelope> request(MessageKind kind, Bytes body, Deadline deadline);

  template <typename Reply, typename Request>
  [[nodiscard]] Result<Reply> call(MessageKind kind, const Request& body, Deadline deadline) {
    KVFERRY_ASSIGN(Envelope envelope, request(kind, encode(body), deadline));
    return decode<Reply>(envelope.body, "reply");
  }

 private:
  ControlLink();
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kvferry::ipc
