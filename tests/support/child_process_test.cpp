// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "support/child_process.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace kvferry::test {
namespace {

using std::chrono::milliseconds;

ChildProcess start(std::vector<std::string> arguments = {}) {
  return ChildProcess(
      {.program = sibling_program("kvferry_echo_child"), .arguments = std::move(arguments)});
}

TEST(ChildProcessTest, CarriesLinesBothWaysAndReportsTheExitCode) {
  ChildProcess child = start({"one", "two words"});
  EXPECT_EQ(child.read_line(soon()), "arg one");
  EXPECT_EQ(child.read_line(soon()), "arg two words");
  EXPECT_TRUE(child.write_line("echo hello"));
  EXPECT_EQ(child.read_line(soon()), "hello");
  EXPECT_TRUE(child.write_line("exit 42"));
  EXPECT_EQ(child.wait(soon()), ChildExit::exited(42));
  EXPECT_EQ(child.wait(soon()), ChildExit::exited(42));
  EXPECT_EQ(child.read_line(soon()), std::nullopt);
}

TEST(ChildProcessTest, KillIsSeenAndLaterWritesFailQuietly) {
  ChildProcess child = start();
  child.kill();
  EXPECT_TRUE(child.wait_zombie(soon()));
  EXPECT_EQ(child.wait(soon()), ChildExit::killed_by(SIGKILL));
  EXPECT_FALSE(child.write_line("echo x"));
  child.kill();
}

TEST(ChildProcessTest, WaitsEndAtTheirDeadlineWhileTheChildLives) {
  ChildProcess child = start();
  EXPECT_EQ(child.read_line(ipc::Deadline::after(milliseconds(10))), std::nullopt);
  EXPECT_EQ(child.wait(ipc::Deadline::after(milliseconds(10))), std::nullopt);
  EXPECT_FALSE(child.wait_zombie(ipc::Deadline::after(milliseconds(10))));
  EXPECT_TRUE(child.write_line("echo still here"));
  EXPECT_TRUE(child.wait_line("still here", soon()));
}

TEST(ChildProcessTest, EndOfStdinEndsTheChild) {
  ChildProcess child = start();
  child.close_stdin();
  EXPECT_EQ(child.wait(soon()), ChildExit::exited(0));
}

TEST(ChildProcessTest, FullStdoutAndLargeStderrBlockNobody) {
  ChildProcess child = start();
  EXPECT_TRUE(child.write_line("complain"));
  EXPECT_TRUE(child.wait_line("complained", soon()));
  EXPECT_EQ(child.stderr_text().size(), 300000U);
  EXPECT_TRUE(child.write_line("flood"));
  EXPECT_EQ(child.wait(soon()), ChildExit::exited(3));
}

TEST(ChildProcessTest, PassesTheNamedDescriptorsAndNoOthers) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);  // Without O_CLOEXEC on purpose.
  const ipc::UniqueFd reader(ends[0]);
  const ipc::UniqueFd writer(ends[1]);
  ChildProcess child({.program = sibling_program("kvferry_echo_child"),
                      .environment = {"KVFERRY_TEST_WORD=seen"},
                      .pass_fds = {writer.get(), reader.get()}});
  for (const auto& [fd, state] : {std::pair{3, "open"}, {4, "open"}, {5, "closed"}}) {
    EXPECT_TRUE(child.write_line("fd " + std::to_string(fd)));
    EXPECT_EQ(child.read_line(soon()), state) << fd;
  }
  EXPECT_TRUE(child.write_line("fd " + std::to_string(std::max(ends[0], ends[1]) + 6)));
  EXPECT_EQ(child.read_line(soon()), "closed");
  EXPECT_TRUE(child.write_line("env KVFERRY_TEST_WORD"));
  EXPECT_EQ(child.read_line(soon()), "seen");
}

TEST(ChildProcessTest, DestructorKillsAndReaps) {
  pid_t pid = -1;
  {
    ChildProcess child = start();
    ChildProcess moved = std::move(child);
    pid = moved.pid();
    EXPECT_TRUE(moved.write_line("echo up"));
    EXPECT_TRUE(moved.wait_line("up", soon()));
  }
  EXPECT_EQ(::waitpid(pid, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(ChildProcessTest, AMissingProgramThrows) {
  EXPECT_THROW(ChildProcess({.program = "/nonexistent/program"}), ipc::Exception);
}

}  // namespace
}  // namespace kvferry::test
