// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Who may take the staging agent's time before it has said who it is.
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/wire/staging_messages.hpp"
#include "multiproc/worker_fixture.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>

#include <vector>

namespace kvferry {
namespace {

using ipc::ErrorCode;
using ipc::PacketSocket;
using std::chrono_literals::operator""ms;
using test::soon;

class WorkerAdmissionTest : public test::WorkerFixture {
 protected:
  void SetUp() override { start_all(); }

  PacketSocket connect() {
    auto socket = PacketSocket::connect(dir_.rank_socket(test::kEngine, 0, "agent"), soon());
    EXPECT_TRUE(socket.has_value());
    return socket ? std::move(socket).value() : PacketSocket();
  }
  /// Says hello as a mover; true when it is welcome.
  static bool greet(PacketSocket& socket) {
    ipc::AgentHello hello;
    hello.mover = ipc::IncarnationId::random();
    hello.engine = test::kEngine;
    if (!socket.send(ipc::encode(hello))) return false;
    const auto packet = socket.receive(soon());
    if (!packet) return false;
    const auto reply = ipc::decode<ipc::StageReply>(packet->bytes, "StageReply");
    return reply && !reply->error;
  }
  [[nodiscard]] std::size_t count_in_log(const std::string& text) const {
    const std::string log = worker_->stderr_text();
    std::size_t count = 0;
    for (std::size_t at = log.find(text); at != std::string::npos; at = log.find(text, at + 1)) {
      ++count;
    }
    return count;
  }
};

TEST_F(WorkerAdmissionTest, SilentConnectionsKeepNoMoverOut) {
  std::vector<PacketSocket> silent;
  // A share of the table is all that one process can fill.
  for (int i = 0; i < 16; ++i) silent.push_back(connect());
  PacketSocket refused = connect();
  EXPECT_EQ(refused.receive(soon()).error().code, ErrorCode::kPeerDied) << "its share is full";
  for (PacketSocket& socket : silent) {
    EXPECT_EQ(socket.receive(soon()).error().code, ErrorCode::kPeerDied);
  }
  PacketSocket mover = connect();
  EXPECT_TRUE(greet(mover));
}

// It asks and asks, and reads no answer: the agent neither waits for it nor keeps the answers.
TEST_F(WorkerAdmissionTest, MoverThatNeverReadsIsDroppedAndTheOthersAreServed) {
  PacketSocket deaf = connect();
  ASSERT_TRUE(greet(deaf));
  ipc::StageRequest request;
  request.id = 1;
  const ipc::Deadline deadline = soon();
  ErrorCode end = ErrorCode::kBusy;
  while (end == ErrorCode::kBusy && !deadline.expired()) {
    const ipc::Status sent = deaf.send(ipc::encode(request));
    if (sent) {
      ++request.id;
      continue;
    }
    end = sent.error().code;
    pollfd room{deaf.fd(), POLLOUT, 0};
    if (end == ErrorCode::kBusy) ::poll(&room, 1, deadline.poll_timeout_ms());
  }
  EXPECT_EQ(end, ErrorCode::kPeerDied) << "the connection";
  PacketSocket mover = connect();
  EXPECT_TRUE(greet(mover));
  EXPECT_EQ(count_in_log("does not read"), 1U);
  EXPECT_LE(count_in_log("refused"), 4U) << "a line for each request";
}

TEST_F(WorkerAdmissionTest, LackOfDescriptorsIsSaidNowAndThenAndEnds) {
  rlimit before{};
  ASSERT_EQ(::prlimit(worker_->pid(), RLIMIT_NOFILE, nullptr, &before), 0);
  const rlimit none{3, before.rlim_max};
  ASSERT_EQ(::prlimit(worker_->pid(), RLIMIT_NOFILE, &none, nullptr), 0);
  const ipc::TimePoint start = ipc::MonotonicClock::now();
  PacketSocket mover = connect();  // waits in the backlog
  pollfd waited{mover.fd(), POLLIN, 0};
  std::size_t said = 0;
  for (const ipc::Deadline deadline = soon(); said == 0 && !deadline.expired();) {
    ASSERT_EQ(::poll(&waited, 1, 1000), 0);
    said = count_in_log("cannot accept");
  }
  const auto took = ipc::MonotonicClock::now() - start;
  EXPECT_GE(said, 1U);
  EXPECT_LE(said, static_cast<std::size_t>(took / 200ms) + 1);
  ASSERT_EQ(::prlimit(worker_->pid(), RLIMIT_NOFILE, &before, nullptr), 0);
  EXPECT_TRUE(greet(mover));
}

}  // namespace
}  // namespace kvferry
