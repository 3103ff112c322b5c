// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/daemons_fixture.hpp"
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/base/clock.hpp"

#include <gmock/gmock.h>
#include <poll.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace kvferry::test {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST_F(DaemonsTest, CommandsWithoutAManagerSayHowToStartOneAndLeaveNoTrace) {
  for (const char* command : {"status", "clear", "reinit"}) {
    const Finished asked = ask(command);
    EXPECT_EQ(asked.exit, ChildExit::exited(3)) << command;
    EXPECT_THAT(asked.complaints, HasSubstr("kvferry manager --instance chat")) << command;
  }
  EXPECT_TRUE(std::filesystem::is_empty(temp_.path()));
}

TEST_F(DaemonsTest, EndedByATermSignalTheyLeaveNoName) {
  start("worker");
  start("mover");
  start("manager");
  ASSERT_TRUE(wait_status(offload_ready)) << running_.back()->stderr_text();
  for (const auto& child : running_) child->signal(SIGTERM);
  for (const auto& child : running_) {
    EXPECT_EQ(child->wait(soon()), ChildExit::exited(0)) << child->stderr_text();
  }
  EXPECT_TRUE(std::filesystem::is_empty(temp_ / "run"));
}

// A new manager knows of nobody until they find it: a clear may come before that.
TEST_F(DaemonsTest, AClearThatComesBeforeTheOwnersHaveRegisteredIsNotCalledDone) {
  for (const char* owner : {"worker", "mover"}) {
    const std::string option = std::string("--cache-owner=") + owner;
    running_.clear();
    ChildProcess& worker = start("worker", {option});
    ChildProcess& mover = start("mover", {option});
    ChildProcess& manager = start("manager");
    ASSERT_TRUE(wait_status(offload_ready)) << manager.stderr_text();
    for (ChildProcess* rank : {&worker, &mover}) ASSERT_TRUE(rank->stop());
    manager.kill();
    ASSERT_EQ(manager.wait(soon()), ChildExit::killed_by(SIGKILL));
    ChildProcess& next = start("manager");
    ASSERT_TRUE(wait_status([](const nlohmann::json&) { return true; })) << next.stderr_text();

    const Finished early = ask("clear");
    EXPECT_EQ(early.exit, ChildExit::exited(1)) << early.output;
    EXPECT_THAT(early.output, HasSubstr("not cleared on all ranks"));
    EXPECT_THAT(early.complaints, HasSubstr("has not registered"));
    const pid_t holder = owner == std::string("worker") ? worker.pid() : mover.pid();
    EXPECT_THAT(early.complaints, HasSubstr("pid " + std::to_string(holder)));

    for (ChildProcess* rank : {&worker, &mover}) rank->signal(SIGCONT);
    ASSERT_TRUE(wait_status(offload_ready)) << next.stderr_text();
    const Finished cleared = ask("clear");
    EXPECT_EQ(cleared.exit, ChildExit::exited(0)) << cleared.complaints;
    EXPECT_THAT(cleared.output, HasSubstr("cleared in"));
  }
}

TEST_F(DaemonsTest, LookingAtTheStatusIsNotWorthALine) {
  ChildProcess& manager = start("manager");
  ASSERT_TRUE(wait_status([](const nlohmann::json&) { return true; })) << manager.stderr_text();
  EXPECT_THAT(manager.stderr_text(), HasSubstr("is ready"));
  EXPECT_THAT(manager.stderr_text(), Not(HasSubstr("operator")));
}

TEST_F(DaemonsTest, WhatTheyDidCanBeSeenAlsoOfThoseThatWereKilled) {
  start("worker");
  ChildProcess& mover = start("mover");
  start("manager");
  ASSERT_TRUE(wait_status(offload_ready)) << running_.back()->stderr_text();
  ASSERT_EQ(ask("clear").exit, ChildExit::exited(0));
  mover.kill();
  EXPECT_EQ(mover.wait(soon()), ChildExit::killed_by(SIGKILL));
  // All of it: how often a slow machine looks again and records that, nobody knows.
  const Finished shown = ask("trace", {"--last", "10000"});
  EXPECT_EQ(shown.exit, ChildExit::exited(0)) << shown.complaints;
  for (const char* words : {"publishes epoch 1 as ready", "has mapped epoch 1 under lease 1",
                            "sees lease 1 released", "publishes epoch 1 as cleared"}) {
    EXPECT_THAT(shown.output, HasSubstr(words));
  }
  EXPECT_THAT(shown.output, HasSubstr(fmt::format("mover default/0 pid {} ", mover.pid())));
  const Finished checked = ask("trace", {"--check"});
  EXPECT_EQ(checked.exit, ChildExit::exited(0)) << checked.output;
  EXPECT_THAT(checked.output, HasSubstr("all allowed"));
}

TEST_F(DaemonsTest, ATraceOfNoInstanceSaysSo) {
  const Finished asked = ask("trace");
  EXPECT_EQ(asked.exit, ChildExit::exited(1));
  EXPECT_THAT(asked.complaints, HasSubstr("is not there"));
}

}  // namespace
}  // namespace kvferry::test
