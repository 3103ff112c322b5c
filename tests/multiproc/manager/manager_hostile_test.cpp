// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A manager under floods and without descriptors: who works with it goes on, nobody spins.
#include "kvferry/ipc/os/packet_socket.hpp"
#include "kvferry/ipc/os/runtime_dir.hpp"
#include "multiproc/manager/manager_fixture.hpp"
#include "support/processor_time.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdio>

namespace kvferry::test {
namespace {

using ipc::Deadline;
using ipc::ErrorCode;
using ipc::MessageKind;
using ipc::ProcessKind;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using testing::HasSubstr;

class ManagerHostileTest : public ManagerTest {
 protected:
  [[nodiscard]] std::string socket(const std::string& name) const {
    return (dir_ / "default" / name).string();
  }
  [[nodiscard]] ChildProcess flood(const std::string& name,
                                   int count,
                                   const std::string& mode) const {
    return ChildProcess({.program = KVFERRY_INTRUDER,
                         .arguments = {"flood", socket(name), std::to_string(count), mode}});
  }
  /// Asks until the flood has said its last; every answer comes in time. How often it was answered.
  int serve_during(ChildProcess& intruder, int& connected) {
    int answers = 0;
    std::optional<std::string> line;
    while (!line && !HasFailure()) {
      const auto reply =
          operator_->link().call<ipc::StatusReply>(MessageKind::kStatus, ipc::Empty{}, soon());
      EXPECT_TRUE(reply.has_value()) << reply.error().to_string();
      ++answers;
      line = intruder.read_line(Deadline::after({}));
      if (!line && intruder.wait_zombie(Deadline::after({}))) break;
    }
    EXPECT_TRUE(line.has_value()) << intruder.stderr_text();
    EXPECT_EQ(std::sscanf(line.value_or("").c_str(), "flooded %d", &connected), 1);
    return answers;
  }
  void set_descriptors(rlim_t count) {
    const rlimit limit{count, limit_.rlim_max};
    ASSERT_EQ(::prlimit(manager_->pid(), RLIMIT_NOFILE, &limit, nullptr), 0);
  }
  [[nodiscard]] std::size_t open_descriptors() const {
    const std::string folder = fmt::format("/proc/{}/fd", manager_->pid());
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
  }
  void limit_descriptors() {
    ASSERT_EQ(::prlimit(manager_->pid(), RLIMIT_NOFILE, nullptr, &limit_), 0);
  }
  /// A new peer, or why there is none.
  [[nodiscard]] ipc::Status try_connect(std::chrono::milliseconds time) const {
    ipc::ControlLink::Options options;
    options.registry_path = socket("registry");
    options.control_path = socket("control");
    options.kind = ProcessKind::kEngine;
    options.incarnation = ipc::Digest::random();
    options.name = "late";
    const auto link = ipc::ControlLink::connect(options, Deadline::after(time));
    return link ? ipc::Status() : ipc::Status(link.error());
  }

  rlimit limit_{};
};

TEST_F(ManagerHostileTest, HonestPeersAreServedThroughFloodsOfConnections) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  constexpr int kCount = 3000;
  for (const auto& [name, mode] :
       {std::pair("registry", "silent"), std::pair("registry", "garbage"),
        std::pair("registry", "hello"), std::pair("control", "garbage")}) {
    SCOPED_TRACE(fmt::format("{} {}", name, mode));
    ChildProcess intruder = flood(name, kCount, mode);
    int connected = 0;
    EXPECT_GE(serve_during(intruder, connected), 1);
    EXPECT_EQ(connected, kCount) << "each was accepted or refused, none forgotten";
    // With the intruder holding on to all that it got, somebody new comes in as well.
    const ipc::Status late = try_connect(20s);
    EXPECT_TRUE(late.has_value()) << late.error().to_string();
    ASSERT_NO_FATAL_FAILURE(store(static_cast<std::uint64_t>(next_job_), 1));
    intruder.kill();
    ASSERT_TRUE(intruder.wait(soon()).has_value());
  }
}

// An engine whose clients come and go, and whoever looks at the status, leave nothing in a manager
// that they outlive.
TEST_F(ManagerHostileTest, ClientsThatLeaveAndOperatorsAreForgottenWhileTheirProcessLives) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  const std::size_t before = open_descriptors();
  for (int round = 0; round < 100; ++round) {
    const auto client = peer(ProcessKind::kEngine, fmt::format("engine {}", round));
    const auto state = client->call<ipc::EngineState>(MessageKind::kEngineHello, client_hello());
    ASSERT_TRUE(state.has_value()) << state.error().to_string();
    client->notify(MessageKind::kBye, ipc::Empty{});
    const auto looks = peer(ProcessKind::kOperator, fmt::format("operator {}", round));
    ASSERT_TRUE(looks->call<ipc::StatusReply>(MessageKind::kStatus, ipc::Empty{}).has_value());
  }
  const Deadline deadline = soon();
  while (open_descriptors() > before && !deadline.expired()) {
    EXPECT_EQ(status()["engines"].size(), 1U);
  }
  EXPECT_LE(open_descriptors(), before);
  ASSERT_NO_FATAL_FAILURE(store(2, 2)) << "the client that stayed works on";
}

TEST_F(ManagerHostileTest, ManagerShortOfDescriptorsRefusesNewPeersAndServesTheOthers) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  limit_descriptors();
  // A few are left, fewer than it keeps in reserve: refused in words.
  set_descriptors(open_descriptors() + 8);
  const ipc::Status refused = try_connect(20s);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kBusy) << refused.error().to_string();
  EXPECT_THAT(refused.error().message, HasSubstr("descriptors"));
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  set_descriptors(limit_.rlim_cur);
  const ipc::Status late = try_connect(20s);
  EXPECT_TRUE(late.has_value()) << late.error().to_string();
}

// ZeroMQ would end the process when it accepts a connection and there is no descriptor for it.
TEST_F(ManagerHostileTest, AFloodOfControlDoesNotGetTheLastDescriptors) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  limit_descriptors();
  constexpr int kRoom = 300;
  set_descriptors(open_descriptors() + kRoom);
  ChildProcess intruder = flood("control", 10 * kRoom, "silent");
  int connected = 0;
  EXPECT_GE(serve_during(intruder, connected), 1);
  ASSERT_NO_FATAL_FAILURE(store(1, 1)) << "who was there works on";
  const ipc::Status shut_out = try_connect(20s);
  ASSERT_FALSE(shut_out.has_value());
  EXPECT_EQ(shut_out.error().code, ErrorCode::kBusy) << shut_out.error().to_string();
  EXPECT_THAT(shut_out.error().message, HasSubstr("descriptors"));
  // When the intruder has gone, somebody new comes in.
  intruder.kill();
  ASSERT_TRUE(intruder.wait(soon()).has_value());
  const Deadline deadline = soon();
  ipc::Status late = try_connect(20s);
  while (!late && late.error().code == ErrorCode::kBusy && !deadline.expired()) {
    late = try_connect(20s);
  }
  EXPECT_TRUE(late.has_value()) << late.error().to_string();
  ASSERT_NO_FATAL_FAILURE(store(2, 2));
}

TEST_F(ManagerHostileTest, ManagerWithoutDescriptorsDoesNotSpinAndRecovers) {
  ASSERT_NO_FATAL_FAILURE(start_engine());
  limit_descriptors();
  set_descriptors(3);
  auto waiting = ipc::PacketSocket::connect(socket("registry"), soon());  // In the backlog.
  ASSERT_TRUE(waiting.has_value()) << waiting.error().to_string();
  const auto before = processor_time(manager_->pid());
  pollfd waited{waiting->fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&waited, 1, 1000), 0);
  EXPECT_LT(processor_time(manager_->pid()) - before, 500ms) << "it tries again and again";
  const ipc::Status late = try_connect(200ms);
  ASSERT_FALSE(late.has_value());
  EXPECT_EQ(late.error().code, ErrorCode::kTimeout) << late.error().to_string();
  ASSERT_NO_FATAL_FAILURE(store(1, 1));
  EXPECT_THAT(manager_->stderr_text(), HasSubstr("accept on socket"));
  set_descriptors(limit_.rlim_cur);
  const ipc::Status again = try_connect(20s);
  EXPECT_TRUE(again.has_value()) << again.error().to_string();
  EXPECT_EQ(status()["pid"], manager_->pid());
}

}  // namespace
}  // namespace kvferry::test
