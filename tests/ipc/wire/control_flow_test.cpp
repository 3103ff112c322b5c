// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What peers can make a server hold, and how long one of them can keep it busy.
#include "ipc/wire/control_fixture.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "support/child_process.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>

namespace kvferry::ipc {
namespace {

using test::ChildProcess;
using test::link_options;
using test::server_options;
using test::ServerThread;
using test::soon;

class ControlFlowTest : public ::testing::Test {
 protected:
  ChildProcess start_peer(const std::string& name) {
    ChildProcess peer({.program = test::sibling_program("kvferry_control_child"),
                       .arguments = {"peer", dir_.path().native(), name}});
    EXPECT_TRUE(peer.wait_line("connected", soon())) << peer.stderr_text();
    return peer;
  }
  /// Sends events until the link's queue is full, and counts them.
  static std::uint64_t fill(ControlLink& link, std::size_t size_bytes) {
    Envelope event;
    event.kind = MessageKind::kUnpin;
    event.body.assign(size_bytes, 1);
    std::uint64_t sent = 0;
    while (sent < 100'000 && link.send(event)) ++sent;
    return sent;
  }

  test::ShortTempDir dir_;
};

TEST_F(ControlFlowTest, WhatAStoppedPeerDoesNotTakeIsBoundedInBytesAndGoesOnWhenItDoes) {
  constexpr std::size_t kMaxBytes = 1 << 20;
  constexpr std::size_t kMessage = 64 << 10;
  constexpr std::uint64_t kInTheKernel = 8 << 20;  // Far above what its sockets take.
  ControlServer::Options options = server_options(dir_.path());
  options.max_queued_bytes = kMaxBytes;
  IncarnationId peer;
  ServerThread server(std::move(options),
                      [&](const Peer& from, const Envelope&) { peer = from.id; });
  ChildProcess child = start_peer("peer");
  ASSERT_TRUE(child.write_line("call"));
  ASSERT_TRUE(child.read_line(soon()).has_value());
  EXPECT_TRUE(child.stop());
  std::uint64_t sent = 0;
  server.call([&] {
    JobDone done;
    done.message.assign(kMessage, 'x');
    for (;;) {
      const Status status = server.server->notify(peer, MessageKind::kJobDone, done);
      if (!status) {
        EXPECT_EQ(status.error().code, ErrorCode::kBusy);
        break;
      }
      ASSERT_LT(++sent * kMessage, kMaxBytes + kInTheKernel);
    }
  });
  EXPECT_GT(sent, 0U);
  EXPECT_EQ(server.handler.count("writable peer"), 0);
  child.signal(SIGCONT);
  ASSERT_TRUE(server.handler.wait_for("writable peer"));
  server.call([&] {
    EXPECT_TRUE(server.server->notify(peer, MessageKind::kJobDone, JobDone{}).has_value());
  });
}

TEST_F(ControlFlowTest, AReplyThatAFullQueueDidNotTakeIsSentWhenThereIsRoom) {
  ControlServer::Options options = server_options(dir_.path());
  options.max_queued_messages = 8;
  std::optional<std::pair<Peer, Envelope>> held;
  ServerThread server(std::move(options), [&](const Peer& from, const Envelope& request) {
    if (request.kind == MessageKind::kPin) held.emplace(from, request);
  });
  ChildProcess child = start_peer("peer");
  ASSERT_TRUE(child.write_line("pin"));
  ASSERT_TRUE(server.handler.wait_for("pin peer"));
  EXPECT_TRUE(child.stop());
  server.call([&] {
    JobDone done;
    done.message.assign(64 << 10, 'x');
    while (server.server->notify(held->first.id, MessageKind::kJobDone, done)) {
    }
    // And the ring, which takes small ones.
    while (server.server->notify(held->first.id, MessageKind::kJobDone, JobDone{})) {
    }
    PinReply reply;
    reply.pinned = 77;
    EXPECT_FALSE(server.server->reply(held->first.id, held->second, reply).has_value());
  });
  child.signal(SIGCONT);
  EXPECT_TRUE(child.wait_line("pinned 77", soon()));
}

TEST_F(ControlFlowTest, OneMessageBeyondTheLimitGoesWhenNothingElseWaits) {
  ControlServer::Options options = server_options(dir_.path());
  options.max_queued_bytes = 1000;
  ServerThread server(std::move(options));
  const ControlLink::Options named = link_options(dir_.path(), "peer");
  auto link = *ControlLink::connect(named, soon());
  server.call([&] {
    JobDone done;
    done.message.assign(100'000, 'x');
    EXPECT_TRUE(server.server->notify(named.incarnation, MessageKind::kJobDone, done).has_value());
  });
  EXPECT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
}

TEST_F(ControlFlowTest, LittleIsReadAheadOfAServerThatIsBusy) {
  ServerThread server(server_options(dir_.path()));
  auto link = *ControlLink::connect(link_options(dir_.path(), "flooder"), soon());
  constexpr std::uint64_t kOwnQueue = 10'000;  // Of the link, on the peer's side.
  constexpr std::uint64_t kOnTheWay = 1000;    // In the kernel and at most 32 in the server.
  std::uint64_t sent = 0;
  server.call([&] {
    // For as long as ZeroMQ's threads may need to move on what they may.
    const Deadline end = Deadline::after(std::chrono::milliseconds(500));
    while (!end.expired()) sent += fill(*link, 4096);
  });
  EXPECT_GE(sent, kOwnQueue / 2);
  EXPECT_LE(sent, kOwnQueue + kOnTheWay);
}

// A peer that never stops sending, while another one dies.
TEST_F(ControlFlowTest, DeathIsToldBetweenShortRoundsWhateverTheOthersSend) {
  ServerThread server(server_options(dir_.path()));
  std::size_t recorded = 0;
  ChildProcess victim = start_peer("victim");
  auto flooder = *ControlLink::connect(link_options(dir_.path(), "flooder"), soon());
  server.call([&] {
    EXPECT_GT(fill(*flooder, 10), 1000U);
    victim.kill();
    EXPECT_TRUE(victim.wait_zombie(soon()));
    recorded = server.handler.recorded_before("died victim");
  });
  std::atomic<bool> flooding{true};
  std::jthread flood([&] {
    while (flooding) (void)fill(*flooder, 10);
  });
  EXPECT_TRUE(server.handler.wait_for("died victim"));
  flooding = false;
  flood.join();
  // A few rounds of 256, and what the flooder has in its ring of 128 KiB: what it sent over the
  // socket, where the victim's last messages may be, comes after that. All would be 10,000 more.
  constexpr std::size_t kInTheRing = (std::size_t{128} << 10) / 48;
  EXPECT_LE(server.handler.recorded_before("died victim") - recorded, 4U * 256 + kInTheRing);
}

}  // namespace
}  // namespace kvferry::ipc
