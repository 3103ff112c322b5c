// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Every socket of running daemons: who else may come, and take its place.
#include "cli/daemons_fixture.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <set>

namespace kvferry::test {
namespace {

namespace fs = std::filesystem;
using testing::IsSupersetOf;

class DoorsTest : public DaemonsTest {
 protected:
  void start_all() {
    start("manager");
    start("worker");
    start("mover");
    ASSERT_TRUE(wait_status(offload_ready)) << running_.back()->stderr_text();
    for (const auto& entry : fs::directory_iterator(instance_)) {
      if (entry.is_socket()) sockets_.insert(entry.path().filename());
    }
    ASSERT_THAT(sockets_, IsSupersetOf({"registry", "control"}));
    ASSERT_EQ(sockets_.size(), 7U) << "and of the rank lease, agent, step, stepctl and keep";
  }
  [[nodiscard]] std::string knock(const std::string& name) const {
    ChildProcess stranger({.program = KVFERRY_INTRUDER,
                           .arguments = {"knock", "65534", (instance_ / name).string()}});
    return stranger.read_line(soon()).value_or("nothing: " + stranger.stderr_text());
  }
  void set_modes(mode_t folders) {
    for (fs::path folder = instance_; folder != temp_.path().parent_path();
         folder = folder.parent_path()) {
      ASSERT_EQ(::chmod(folder.c_str(), folders), 0) << folder;
    }
  }
  void expect_all_well() {
    EXPECT_TRUE(wait_status(offload_ready)) << running_.back()->stderr_text();
    for (const auto& child : running_) child->signal(SIGTERM);
    for (const auto& child : running_) {
      EXPECT_EQ(child->wait(soon()), ChildExit::exited(0)) << child->stderr_text();
    }
  }

  const fs::path instance_ = temp_ / "run" / "chat";
  std::set<std::string> sockets_;
};

TEST_F(DoorsTest, AnotherUserGetsNothingAtAnySocketEvenWithEveryModeOpened) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  ASSERT_NO_FATAL_FAILURE(start_all());
  const std::string denied = fmt::format("refused {}", EACCES);
  for (const std::string& name : sockets_) EXPECT_EQ(knock(name), denied) << name;
  // Modes were all that kept it out so far. What is behind them keeps it out as well.
  ASSERT_NO_FATAL_FAILURE(set_modes(0755));
  for (const std::string& name : sockets_) {
    EXPECT_EQ(knock(name), denied) << name;
    ASSERT_EQ(::chmod((instance_ / name).c_str(), 0666), 0);
    EXPECT_EQ(knock(name), "closed") << name;
  }
  ASSERT_NO_FATAL_FAILURE(set_modes(0700));
  expect_all_well();
}

TEST_F(DoorsTest, NoSocketIsBoundASecondTime) {
  ASSERT_NO_FATAL_FAILURE(start_all());
  for (const std::string& name : sockets_) {
    const fs::path path = instance_ / name;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    ASSERT_LT(path.native().size(), sizeof(address.sun_path));
    std::memcpy(address.sun_path, path.c_str(), path.native().size());
    for (const int type : {SOCK_SEQPACKET, SOCK_STREAM}) {
      const ipc::UniqueFd fd(::socket(AF_UNIX, type, 0));
      const auto* bare = reinterpret_cast<const sockaddr*>(&address);
      EXPECT_EQ(::bind(fd.get(), bare, sizeof(address)), -1) << name;
      EXPECT_EQ(errno, EADDRINUSE) << name;
    }
    if (!fs::exists(path.native() + ".lock")) continue;  // It lives under another's lock.
    const auto listener = ipc::PacketListener::listen(path);
    ASSERT_FALSE(listener.has_value()) << name;
    EXPECT_EQ(listener.error().code, ipc::ErrorCode::kAlreadyExists) << name;
  }
  // A second daemon of each kind ends, and says why.
  for (const char* daemon : {"manager", "worker", "mover"}) {
    const std::unique_ptr<ChildProcess> first = std::move(running_.front());
    running_.erase(running_.begin());
    ChildProcess& second = start(daemon);
    const auto exit = second.wait(soon());
    ASSERT_TRUE(exit.has_value()) << daemon << "\n" << second.stderr_text();
    EXPECT_FALSE(exit->by_signal) << daemon;
    EXPECT_NE(exit->code, 0) << daemon;
    EXPECT_THAT(second.stderr_text(), testing::HasSubstr("already_exists")) << daemon;
    running_.pop_back();
    running_.push_back(std::make_unique<ChildProcess>(std::move(*first)));
  }
  expect_all_well();
}

}  // namespace
}  // namespace kvferry::test
