// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/error.hpp"
#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"

#include <chrono>
#include <functional>
#include <map>
#include <string>

namespace kvferry::ipc::lease {

/// The connections to a lease's owner up to their hello: accepts them, and bounds how many may
/// linger without one and for how long. @threading the loop's thread.
class Strangers {
 public:
  struct Hooks {
    /// The first packet of a connection, which is nobody's any more.
    std::function<void(PacketSocket, Packet)> on_packet;
    /// There are too many; the connection is closed afterwards.
    std::function<void(PacketSocket&, Error)> on_surplus;
  };

  /// Listens at once. loop and listener outlive it.
  Strangers(EventLoop& loop,
            PacketListener& listener,
            std::string tag,
            std::chrono::milliseconds hello_time,
            Hooks hooks);
  Strangers(const Strangers&) = delete;
  Strangers& operator=(const Strangers&) = delete;
  ~Strangers();

 private:
  struct Stranger {
    PacketSocket socket;
    TimerId timer = 0;
  };

  void accept();
  [[nodiscard]] Status check_room(const PacketSocket& socket) const;
  void pause_accepting();
  void on_event(int fd);
  PacketSocket take(int fd);

  EventLoop& loop_;
  PacketListener& listener_;
  const std::string tag_;
  const std::chrono::milliseconds hello_time_;
  const Hooks hooks_;
  TimerId pause_timer_ = 0;
  std::map<int, Stranger> waiting_;
};

}  // namespace kvferry::ipc::lease
