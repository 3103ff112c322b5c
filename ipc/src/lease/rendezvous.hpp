// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/lease/lease.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"

#include <filesystem>
#include <functional>
#include <list>
#include <optional>
#include <string>

namespace kvferry::ipc::lease {

/// Where attachers that find no owner meet. When worker and mover were both started as attachers,
/// nobody listens and both would wait for ever: so the first one listens here, the next says hello
/// to it, and if they disagree about who owns, both learn it at once. Attachers that agree part
/// without a word more.
/// @threading the loop's thread. @lifetime loop outlives it.
class Rendezvous {
 public:
  using OnConflict = std::function<void(Error)>;

  Rendezvous(EventLoop& loop,
             const LeaseIdentity& identity,
             std::chrono::milliseconds timeout,
             TransitionLog transitions,
             OnConflict on_conflict);
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  ~Rendezvous();

  /// Listens there, or says hello to who does. Calling it again while open does nothing.
  void open(const std::filesystem::path& path);
  void close();

 private:
  struct Peer {
    PacketSocket socket;
    TimerId timer = 0;
    bool ours = false;  ///< We connected and said hello.
  };
  void accept();
  void add(PacketSocket socket, bool ours);
  void drop(int fd);
  void on_packet(int fd);
  [[nodiscard]] Status answer(Peer& peer, Packet packet) const;

  EventLoop& loop_;
  const LeaseIdentity& identity_;
  const std::chrono::milliseconds timeout_;
  const TransitionLog transitions_;
  const OnConflict on_conflict_;
  std::optional<PacketListener> listener_;
  TimerId pause_timer_ = 0;  ///< Armed while the listener is not watched.
  std::list<Peer> peers_;
  bool said_ = false;  ///< Hello, since it was opened.
};

}  // namespace kvferry::ipc::lease
