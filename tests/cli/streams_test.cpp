// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>

#include <fstream>
#include <string>
#include <vector>

// kvferry whose terminal, pipe or disk does not take what it says.
namespace kvferry::test {
namespace {

using testing::HasSubstr;

class StreamsTest : public ReplayTest {
 protected:
  /// Runs a shell script in which "$@" is the program with these arguments.
  static Finished shell(const std::string& script, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"-c", script, "sh", KVFERRY_PROGRAM});
    ChildProcess child(ChildOptions{"/bin/sh", std::move(arguments)});
    child.close_stdin();
    Finished finished;
    const ipc::Deadline deadline = ipc::Deadline::after(std::chrono::seconds(90));
    while (const auto line = child.read_line(deadline)) finished.output += *line + "\n";
    finished.exit = child.wait(deadline);
    finished.complaints = child.stderr_text();
    return finished;
  }
  std::vector<std::string> short_replay() { return replay_arguments(write_trace(60, 20)); }
};

TEST_F(StreamsTest, AFullStderrDoesNotEndTheRun) {
  const Finished run = shell("exec \"$@\" 2>/dev/full", short_replay());
  EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output;
  EXPECT_THAT(run.output, HasSubstr("requests served"));
}

TEST_F(StreamsTest, AClosedStderrDoesNotEndTheRunAndNothingElseGetsItsNumber) {
  const Finished run = shell("exec \"$@\" 2>&-", short_replay());
  EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output;
  EXPECT_EQ(report()["blocks_corrupt"], 0);
}

TEST_F(StreamsTest, ASummaryThatNobodyGetsFailsTheRun) {
  for (const char* target : {"/dev/full", "&-"}) {
    const Finished run = shell(std::string("exec \"$@\" >") + target, short_replay());
    EXPECT_EQ(run.exit, ChildExit::exited(1)) << target << run.complaints;
    EXPECT_THAT(run.complaints, HasSubstr("the output is not complete")) << target;
    EXPECT_EQ(report()["requests"], 60) << target;
  }
}

TEST_F(StreamsTest, EveryCommandNoticesAFullStdout) {
  const std::vector<std::vector<std::string>> commands = {
      {"--help"}, {"--version"}, {"replay", "--help"}};
  for (const auto& arguments : commands) {
    const Finished run = shell("exec \"$@\" >/dev/full", arguments);
    EXPECT_EQ(run.exit, ChildExit::exited(1)) << arguments.front() << run.complaints;
  }
}

TEST_F(StreamsTest, AReaderThatGoesAwayEndsTheRunAndLeavesNothing) {
  // Long enough that only the broken pipe can end it within the test's time.
  std::vector<std::string> arguments = replay_arguments(write_trace(2000, 30, 1000), {"--speed=1"});
  const Finished run =
      shell("{ \"$@\" 2>&1; echo $? >'" + path("code") + "'; } | head -n 1", arguments);
  EXPECT_EQ(run.output, "kvferry replay\n");
  std::ifstream code(path("code"));
  int exit = -1;
  code >> exit;
  EXPECT_EQ(exit, 1);
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "run"));
  EXPECT_EQ(report()["leftover_names"], 0) << report()["leftover_paths"];
  EXPECT_EQ(report()["leaked_host_bytes"], 0);
}

}  // namespace
}  // namespace kvferry::test
