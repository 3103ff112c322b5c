// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kvferry/ipc/os/event_loop.hpp"
#include "kvferry/ipc/os/own_thread.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/wire/codec.hpp"
#include "kvferry/ipc/wire/loan_messages.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace kvferry::test {

/// One packet of a lender's answer.
struct LenderPacket {
  std::vector<std::uint8_t> bytes;
  std::vector<ipc::UniqueFd> fds{};
  bool closes = false;  ///< The connection, behind this; without bytes only that.
};

/// What lends weights, in this process, on its real socket, and answers what a script says: for
/// lenders that lie.
class ScriptedLender {
 public:
  /// Runs on the lender's thread. No packet: silence.
  using Script = std::function<std::vector<LenderPacket>(const ipc::LoanRequest&)>;

  ScriptedLender(const std::filesystem::path& socket, Script script)
      : script_(std::move(script)),
        listener_(ipc::PacketListener::listen(socket).value()),
        thread_("lender", ipc::OwnThread::Runs::kOurCode, [this] { serve(); }) {}
  ScriptedLender(const ScriptedLender&) = delete;
  ScriptedLender& operator=(const ScriptedLender&) = delete;
  ~ScriptedLender() { loop_.stop(); }

  /// Borrowers that said that they let go.
  [[nodiscard]] int returns() const noexcept { return returns_; }

 private:
  void serve() {
    loop_.watch(listener_.fd(), [this] { accept(); });
    loop_.run();
  }
  void accept() {
    auto socket = listener_.try_accept();
    if (!socket || !*socket) return;
    const int fd = (*socket)->fd();
    peers_.emplace(fd, std::move(**socket));
    loop_.watch(fd, [this, fd] { on_readable(fd); });
  }
  void on_readable(int fd) {
    auto packet = peers_.at(fd).try_receive();
    if (!packet) return close(fd);
    if (!*packet) return;
    const auto request = ipc::decode<ipc::LoanRequest>((*packet)->bytes, "LoanRequest").value();
    if (request.step == ipc::LoanStep::kReturn) ++returns_;
    for (const LenderPacket& answer : script_(request)) {
      send(fd, answer);
      if (answer.closes) return close(fd);
    }
  }
  void send(int fd, const LenderPacket& answer) {
    if (answer.bytes.empty()) return;
    if (answer.bytes.size() > ipc::PacketSocket::kMaxPacketBytes) {  // We would never do that.
      (void)::send(fd, answer.bytes.data(), answer.bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      return;
    }
    std::vector<int> fds;
    for (const ipc::UniqueFd& each : answer.fds) fds.push_back(each.get());
    (void)peers_.at(fd).send(answer.bytes, fds);
  }
  void close(int fd) {
    loop_.unwatch(fd);
    peers_.erase(fd);
  }

  const Script script_;
  ipc::PacketListener listener_;
  ipc::EventLoop loop_;
  std::map<int, ipc::PacketSocket> peers_;  ///< Of the thread.
  std::atomic<int> returns_{0};
  ipc::OwnThread thread_;  ///< Last: starts when all above exists.
};

}  // namespace kvferry::test
