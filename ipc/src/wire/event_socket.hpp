// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/base/result.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "kvferry/ipc/wire/codec.hpp"
#include "wire/guarded_accept.hpp"

#include <zmq.hpp>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvferry::ipc {

/// A ZeroMQ socket of the KV events, with a context of its own: it speaks with programs that are
/// not ours, in messages of several parts. Never blocks. Its descriptor is edge-like: after every
/// send and receive, readable() tells whether a message waits that the descriptor will not announce
/// again. @threading one at a time.
class EventSocket {
 public:
  using Part = std::span<const std::uint8_t>;

  /// A PUB or ROUTER. Throws Exception: another process listens there (kAlreadyExists).
  /// @param most_queued unsent messages of one peer
  EventSocket(zmq::socket_type type, const std::string& endpoint, int most_queued);
  /// A SUB for all topics, or a DEALER. Throws Exception.
  static EventSocket connect(zmq::socket_type type, const std::string& endpoint, int most_queued);

  [[nodiscard]] int fd() const noexcept { return fd_; }
  /// Of one that listens: with the port that it was given for port 0.
  [[nodiscard]] const std::string& endpoint() const noexcept { return endpoint_; }
  [[nodiscard]] bool readable() noexcept;
  /// What is beyond 8 parts is dropped.
  [[nodiscard]] std::optional<std::vector<Bytes>> try_receive() noexcept;
  /// 0, EAGAIN (queue full), EHOSTUNREACH (ROUTER: no such peer) or another errno.
  [[nodiscard]] int send(std::initializer_list<Part> parts) noexcept;
  /// Of one that connects: whether somebody who speaks ZeroMQ is at the other end.
  [[nodiscard]] bool is_connected() noexcept;
  /// Of a PUB: as send(), to all whose queue has room. False when some subscriber's had none.
  [[nodiscard]] bool publish(std::initializer_list<Part> parts) noexcept;

 private:
  EventSocket(zmq::socket_type type, int most_queued);
  void listen_on_path(const std::string& path);
  void listen_on_port(std::string_view host_and_port);
  void serve(UniqueFd listening);
  void watch_connection();
  [[nodiscard]] int send_part(Part part, bool more) noexcept;

  std::optional<NameLock> lock_;  ///< Of a path; ends last, when nobody listens there any more.
  // wait-brief: its destructor waits until ZeroMQ's threads have closed the socket; linger is 0
  zmq::context_t context_;
  zmq::socket_t socket_;                  // ends before its context
  std::optional<zmq::socket_t> monitor_;  ///< Of one that connects.
  bool connected_ = false;
  std::unique_ptr<GuardedAccept> guard_;
  std::string endpoint_;
  int fd_ = -1;
};

}  // namespace kvferry::ipc
