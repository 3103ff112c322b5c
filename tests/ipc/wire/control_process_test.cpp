// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "ipc/wire/control_fixture.hpp"
#include "kvferry/ipc/wire/control.hpp"
#include "support/child_process.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <csignal>

namespace kvferry::ipc {
namespace {

using test::ChildProcess;
using test::link_options;
using test::server_options;
using test::ServerThread;
using test::soon;
using ::testing::HasSubstr;

// Far above what it takes, far below any deadline in these tests.
constexpr auto kQuick = std::chrono::seconds(10);

class ControlProcessTest : public ::testing::TestWithParam<bool> {
 protected:
  ChildProcess start(std::vector<std::string> arguments) {
    return ChildProcess(
        {.program = test::sibling_program("kvferry_control_child"),
         .arguments = std::move(arguments),
         .environment = {std::string("KVFERRY_FORCE_PIDFD_FALLBACK=") + (GetParam() ? "1" : "0")}});
  }
  ChildProcess start_server() {
    ChildProcess server = start({"server", dir_.path().native()});
    EXPECT_TRUE(server.wait_line("ready", soon())) << server.stderr_text();
    return server;
  }
  ChildProcess start_peer(const std::string& name) {
    ChildProcess peer = start({"peer", dir_.path().native(), name});
    EXPECT_TRUE(peer.wait_line("connected", soon())) << peer.stderr_text();
    return peer;
  }
  std::unique_ptr<ControlLink> connect() {
    return *ControlLink::connect(link_options(dir_.path(), "test"), soon());
  }

  void SetUp() override {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): no other thread runs yet.
    ASSERT_EQ(::setenv("KVFERRY_FORCE_PIDFD_FALLBACK", GetParam() ? "1" : "0", 1), 0);
  }

  test::ShortTempDir dir_;
};

INSTANTIATE_TEST_SUITE_P(BothPaths, ControlProcessTest, ::testing::Bool(), [](const auto& way) {
  return way.param ? "Fallback" : "PeerPidfd";
});

TEST_P(ControlProcessTest, AKilledServerIsLostAtOnceAndItsSuccessorTakesThePath) {
  ChildProcess first = start_server();
  auto link = connect();
  EXPECT_EQ(link->server().pid(), first.pid());
  const TimePoint killed = MonotonicClock::now();
  first.kill();
  pollfd entry{link->fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&entry, 1, 20'000), 1);
  EXPECT_TRUE(link->server_lost());
  EXPECT_LT(MonotonicClock::now() - killed, kQuick);
  EXPECT_EQ(link->send(Envelope()).error().code, ErrorCode::kPeerDied);
  ASSERT_TRUE(first.wait(soon()).has_value());
  EXPECT_EQ(ControlLink::connect(link_options(dir_.path(), "early"), soon()).error().code,
            ErrorCode::kNoManager);

  ChildProcess second = start_server();
  link = connect();
  const auto status = link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon());
  ASSERT_TRUE(status.has_value()) << status.error().to_string();
  EXPECT_EQ(status->json, std::to_string(second.pid()));
}

TEST_P(ControlProcessTest, ARequestEndsWhenItsServerIsKilled) {
  const ChildProcess server = start_server();
  auto link = connect();
  const TimePoint start = MonotonicClock::now();
  const auto reply = link->request(MessageKind::kClear, encode(Empty{}), soon());
  ASSERT_FALSE(reply.has_value());
  EXPECT_EQ(reply.error().code, ErrorCode::kPeerDied);
  EXPECT_LT(MonotonicClock::now() - start, kQuick);
}

TEST_P(ControlProcessTest, AStoppedServerIsNotLostAndServesOnWhenContinued) {
  ChildProcess server = start_server();
  auto link = connect();
  EXPECT_TRUE(server.stop());
  const auto reply = link->request(MessageKind::kStatus, encode(Empty{}),
                                   Deadline::after(std::chrono::milliseconds(50)));
  ASSERT_FALSE(reply.has_value());
  EXPECT_EQ(reply.error().code, ErrorCode::kTimeout);
  EXPECT_FALSE(link->server_lost());
  server.signal(SIGCONT);
  EXPECT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
}

TEST_P(ControlProcessTest, AKilledPeerHasDiedAndTheOthersAreServed) {
  ServerThread server(server_options(dir_.path()));
  ChildProcess victim = start_peer("victim");
  ChildProcess witness = start_peer("witness");
  EXPECT_EQ(server.handler.count("peer victim"), 1);
  victim.kill();
  ASSERT_TRUE(server.handler.wait_for("died victim"));
  EXPECT_EQ(server.handler.count("silent victim"), 0) << "death is told as death";
  ASSERT_TRUE(witness.write_line("call"));
  EXPECT_TRUE(witness.wait_line("1", soon()));
  EXPECT_EQ(server.handler.count("died witness"), 0);
}

TEST_P(ControlProcessTest, ASilentPeerIsToldApartFromADeadOne) {
  ServerThread server(server_options(dir_.path()));
  ChildProcess peer = start_peer("peer");
  ASSERT_TRUE(peer.write_line("call"));
  ASSERT_TRUE(peer.wait_line("1", soon()));
  ASSERT_TRUE(peer.write_line("close"));
  ASSERT_TRUE(peer.wait_line("closed", soon()));
  ASSERT_TRUE(server.handler.wait_for("silent peer"));
  EXPECT_EQ(server.handler.count("died peer"), 0);
  peer.kill();
  ASSERT_TRUE(server.handler.wait_for("died peer"));
  EXPECT_EQ(server.handler.count("died peer"), 1);
}

TEST_P(ControlProcessTest, ManyPeersComeAndDieAndNoneIsForgotten) {
  ServerThread server(server_options(dir_.path()));
  constexpr int kPeers = 8;
  std::vector<ChildProcess> peers;
  for (int i = 0; i < kPeers; ++i) peers.push_back(start_peer(std::to_string(i)));
  for (ChildProcess& peer : peers) ASSERT_TRUE(peer.write_line("call"));
  for (ChildProcess& peer : peers) peer.kill();
  for (int i = 0; i < kPeers; ++i) {
    EXPECT_TRUE(server.handler.wait_for("died " + std::to_string(i)));
  }
  auto link = connect();
  EXPECT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
  server.call([&] { EXPECT_EQ(server.server->protocol_errors(), 0U); });
}

TEST_P(ControlProcessTest, ASecondServerProcessIsRefusedAndTheFirstServesOn) {
  ChildProcess first = start_server();
  ChildProcess second = start({"server", dir_.path().native()});
  const auto line = second.read_line(soon());
  ASSERT_TRUE(line.has_value());
  EXPECT_THAT(*line, HasSubstr("already_exists"));
  EXPECT_THAT(*line, HasSubstr(std::to_string(first.pid())));
  ASSERT_TRUE(second.wait(soon()).has_value());
  auto link = connect();
  EXPECT_TRUE(link->call<StatusReply>(MessageKind::kStatus, Empty{}, soon()).has_value());
}

TEST_P(ControlProcessTest, AnOrderlyEndLeavesNoNames) {
  ChildProcess server = start_server();
  auto link = connect();
  server.close_stdin();
  EXPECT_EQ(server.wait(soon()), test::ChildExit::exited(0));
  EXPECT_TRUE(link->server_lost());
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path()));
}

}  // namespace
}  // namespace kvferry::ipc
