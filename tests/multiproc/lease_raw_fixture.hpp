// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lease/lease_messages.hpp"
#include "lease/lease_words.hpp"
#include "multiproc/lease_fixture.hpp"
#include "support/lease_geometry.hpp"

#include <gtest/gtest.h>
#include <poll.h>

#include <optional>
#include <utility>

namespace kvferry::test {

/// An attacher of the worker's kind in this very process, packet by packet. The owner is a mover: a
/// worker is never killed.
class LeaseRawTest : public LeaseFixture {
 protected:
  LeaseRawTest() {
    owner_ = "mover";
    // A busy machine is in time for these; a test whose deadline has to pass sets another.
    common_ = {{"revoke", "20000"}, {"settle", "300"}, {"hello", "20000"}};
    identity_.instance = "test";
    identity_.engine = "chat";
    identity_.ranks = 1;
    identity_.self = ipc::ProcessKind::kWorker;
    identity_.cache_owner = ipc::CacheOwner::kMover;
    identity_.handles = ipc::HandleKind::kVmm;
    identity_.fingerprint = small_geometry(2, 1).fingerprint(ipc::ArenaOrder::kLayerFirst);
    identity_.incarnation = ipc::Digest::random();
  }

  ipc::PacketSocket connect() {
    auto socket = ipc::PacketSocket::connect(dir_ / "test/chat.0.lease", soon());
    EXPECT_TRUE(socket.has_value());
    return socket ? std::move(socket).value() : ipc::PacketSocket();
  }

  static std::optional<ipc::PacketSocket> accept(ipc::PacketListener& listener) {
    const ipc::Deadline deadline = soon();
    while (!deadline.expired()) {
      pollfd waited{listener.fd(), POLLIN, 0};
      if (::poll(&waited, 1, deadline.poll_timeout_ms()) != 1) break;
      auto accepted = listener.try_accept();
      if (!accepted || accepted->has_value()) {
        return accepted ? std::move(accepted).value() : std::nullopt;
      }
    }
    return std::nullopt;
  }

  static ipc::lease::Incoming receive(ipc::PacketSocket& socket) {
    auto packet = socket.receive(soon());
    EXPECT_TRUE(packet.has_value());
    if (!packet) return {};
    auto incoming = ipc::lease::read_header(std::move(packet).value());
    EXPECT_TRUE(incoming.has_value());
    return incoming ? std::move(incoming).value() : ipc::lease::Incoming{};
  }

  static void expect_closed(ipc::PacketSocket& socket) {
    const auto packet = socket.receive(soon());
    ASSERT_FALSE(packet.has_value());
    EXPECT_EQ(packet.error().code, ipc::ErrorCode::kPeerDied);
  }

  static ipc::ErrorCode refusal(ipc::PacketSocket& socket) {
    const ipc::lease::Incoming incoming = receive(socket);
    EXPECT_EQ(incoming.message, ipc::lease::LeaseMessage::kRefused);
    const auto body = ipc::lease::read_body<ipc::lease::RefusedBody>(incoming, "Refused");
    EXPECT_TRUE(body.has_value());
    return body ? body->error.code : ipc::ErrorCode::kCancelled;
  }

  ipc::lease::AttacherWords make_words() const {
    auto words = ipc::lease::AttacherWords::create(identity_.incarnation);
    if (!words) throw ipc::Exception(words.error());
    return std::move(words).value();
  }

  // Hello and welcome.
  ipc::lease::WelcomeBody greet(ipc::PacketSocket& socket, const ipc::lease::AttacherWords& words) {
    const int fd = words.fd();
    EXPECT_TRUE(
        send(socket, ipc::lease::LeaseMessage::kHello, ipc::lease::HelloBody{identity_}, {&fd, 1}));
    const ipc::lease::Incoming incoming = receive(socket);
    EXPECT_EQ(incoming.message, ipc::lease::LeaseMessage::kWelcome);
    const auto body = ipc::lease::read_body<ipc::lease::WelcomeBody>(incoming, "Welcome", 1);
    EXPECT_TRUE(body.has_value());
    return body ? *body : ipc::lease::WelcomeBody{};
  }

  ipc::LeaseId take_grant(ipc::PacketSocket& socket) {
    EXPECT_TRUE(
        send(socket, ipc::lease::LeaseMessage::kAttach, ipc::lease::AttachBody{ipc::Epoch{1}}));
    ipc::lease::Incoming incoming = receive(socket);
    EXPECT_EQ(incoming.message, ipc::lease::LeaseMessage::kGrant);
    const auto body = ipc::lease::read_body<ipc::lease::GrantBody>(incoming, "Grant", 1);
    EXPECT_TRUE(body.has_value());
    return body ? body->lease : ipc::LeaseId{};
  }

  // Another attacher, an honest one, is served.
  void expect_serves(LeasePeer& owner, int epoch) {
    auto honest = start_attacher();
    honest->expect_mapped(static_cast<std::uint64_t>(epoch));
    honest->quit();
    (void)owner;
  }

  ipc::LeaseIdentity identity_;
};

}  // namespace kvferry::test
