// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// The soak itself, briefly: that it passes, and that it fails when something leaks.
#include "support/child_process.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

namespace kvferry::test {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

struct Ended {
  std::optional<ChildExit> exit;
  std::string output;
};

Ended soak(std::vector<std::string> arguments) {
  ChildProcess child(ChildOptions{
      .program = KVFERRY_SOAK, .arguments = std::move(arguments), .capture_stderr = false});
  const ipc::Deadline deadline = ipc::Deadline::after(std::chrono::seconds(100));
  Ended ended;
  while (const auto line = child.read_line(deadline)) ended.output += *line + "\n";
  ended.exit = child.wait(deadline);
  return ended;
}

struct Setting {
  const char* owner;
  const char* copies;
};
class SoakTest : public testing::TestWithParam<Setting> {};

INSTANTIATE_TEST_SUITE_P(Settings,
                         SoakTest,
                         testing::Values(Setting{"worker", "auto"},
                                         Setting{"mover", "auto"},
                                         Setting{"worker", "agent"}),
                         [](const auto& setting) {
                           return std::string(setting.param.owner) + "_" + setting.param.copies;
                         });

TEST_P(SoakTest, AFewCyclesWithKillsLeaveNothing) {
  const Ended run =
      soak({"--cycles=30", std::string("--owner=") + GetParam().owner,
            std::string("--copy-strategy=") + GetParam().copies, "--kills=0.2", "--look-every=5"});
  EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output;
  EXPECT_THAT(run.output, Not(HasSubstr("FAILED")));
  EXPECT_THAT(run.output, Not(HasSubstr("not counted")));
}

struct Injected {
  const char* what;
  const char* cycles;
  const char* figure;
};
class SoakLeakTest : public testing::TestWithParam<Injected> {};

INSTANTIATE_TEST_SUITE_P(Leaks,
                         SoakLeakTest,
                         testing::Values(Injected{"descriptor", "11", "descriptors, names"},
                                         Injected{"name", "11", "descriptors, names"},
                                         Injected{"memory", "60", "live heap, engine"},
                                         Injected{"data", "11", "blocks corrupt"}),
                         [](const auto& leak) { return leak.param.what; });

TEST_P(SoakLeakTest, IsReported) {
  const Ended run = soak({std::string("--cycles=") + GetParam().cycles, "--kills=0", "--stops=0",
                          "--look-every=5", std::string("--inject=") + GetParam().what});
  EXPECT_EQ(run.exit, ChildExit::exited(1)) << run.output;
  EXPECT_THAT(run.output, ContainsRegex(std::string(GetParam().figure) + ".*FAILED"));
}

}  // namespace
}  // namespace kvferry::test
