// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/daemons_fixture.hpp"
#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/base/clock.hpp"
#include "support/safetensors_writer.hpp"

#include <gmock/gmock.h>
#include <poll.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace kvferry::test {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST_F(DaemonsTest, CommandsWithoutAManagerSayHowToStartOneAndLeaveNoTrace) {
  for (const char* command : {"status", "pause", "continue", "flush", "clear", "reinit"}) {
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

TEST_F(DaemonsTest, AnEngineIsPausedForTheSchedulerThatComesLater) {
  start("worker");
  start("mover");
  start("manager");
  ASSERT_TRUE(wait_status(offload_ready)) << running_.back()->stderr_text();
  const Finished paused = ask("pause", {"--mode=in_place"});
  EXPECT_EQ(paused.exit, ChildExit::exited(0)) << paused.complaints;
  EXPECT_THAT(paused.output, HasSubstr("no scheduler is connected; one that comes is held"));
  EXPECT_THAT(ask("status").output, HasSubstr("paused (in_place)"));
  const Finished flushed = ask("flush", {"--timeout=0.5"});
  EXPECT_EQ(flushed.exit, ChildExit::exited(1)) << flushed.output;
  EXPECT_THAT(flushed.complaints, HasSubstr("no scheduler is connected"));
  const Finished resumed = ask("continue");
  EXPECT_EQ(resumed.exit, ChildExit::exited(0)) << resumed.complaints;
  EXPECT_THAT(resumed.output, HasSubstr("free on device"));
  EXPECT_EQ(ask("continue").exit, ChildExit::exited(1));
  EXPECT_EQ(ask("flush", {"--timeout=-1"}).exit, ChildExit::exited(2));
}

TEST_F(DaemonsTest, WeightsAreUpdatedFromDiskOnEveryRankOrOnNone) {
  const std::string first = (temp_ / "first").string();
  const std::string second = (temp_ / "second").string();
  write_safetensors(first, {{"w", "BF16", {64, 32}}, {"n", "F32", {5}}}, 1);
  write_safetensors(second, {{"w", "BF16", {64, 32}}, {"n", "F32", {5}}}, 2);
  const std::string id = "0123456789abcdef0123456789abcdef";
  for (const char* rank : {"--rank=0", "--rank=1"}) {
    start("worker", {rank, "--ranks=2", "--weights=" + first, "--weights-id=" + id});
    start("mover", {rank, "--ranks=2"});
  }
  start("manager");
  ASSERT_TRUE(wait_status(offload_ready)) << running_.back()->stderr_text();
  const auto weights = [this] {
    return nlohmann::json::parse(ask("status", {"--json"}).output)["engines"][0]["weights"];
  };
  EXPECT_EQ(weights(), id);
  const Finished early = ask("update-weights", {"--file=" + second});
  EXPECT_EQ(early.exit, ChildExit::exited(1));
  EXPECT_THAT(early.complaints, HasSubstr("no scheduler has connected"));
  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  const Finished updated = ask("update-weights", {"--from=disk", "--file=" + second});
  EXPECT_EQ(updated.exit, ChildExit::exited(0)) << updated.complaints;
  EXPECT_THAT(updated.output, HasSubstr("on 2 ranks, 4.04 KiB"));
  const nlohmann::json fresh = weights();
  EXPECT_NE(fresh, id);
  // What fails on a rank changes nothing on any: the file is gone, or another model's.
  const Finished missing = ask("update-weights", {"--file=/nowhere"});
  EXPECT_EQ(missing.exit, ChildExit::exited(1));
  EXPECT_THAT(missing.complaints, HasSubstr("weights file /nowhere"));
  write_safetensors(second, {{"w", "BF16", {64, 33}}}, 3);
  const Finished other = ask("update-weights", {"--file=" + second});
  EXPECT_EQ(other.exit, ChildExit::exited(1));
  EXPECT_THAT(other.complaints, HasSubstr("BF16 [64, 33]"));
  EXPECT_EQ(weights(), fresh);
  const Finished sent = ask("update-weights", {"--from=tensor", "--file=" + second});
  EXPECT_EQ(sent.exit, ChildExit::exited(1));
  EXPECT_THAT(sent.complaints, HasSubstr("BF16 [64, 33]"));
  EXPECT_EQ(weights(), fresh);
  const Finished back =
      ask("update-weights", {"--from=tensor", "--file=" + first, "--weights-id=" + id});
  EXPECT_EQ(back.exit, ChildExit::exited(0)) << back.complaints;
  EXPECT_THAT(back.output, HasSubstr("on 2 ranks, 4.04 KiB"));
  EXPECT_EQ(weights(), id);
}

TEST_F(DaemonsTest, AWorkerWithoutWeightsSaysSo) {
  start("worker");
  start("mover");
  start("manager");
  ASSERT_TRUE(wait_status(offload_ready)) << running_.back()->stderr_text();
  ASSERT_EQ(ask("pause").exit, ChildExit::exited(0));
  const Finished asked = ask("update-weights", {"--file=/nowhere"});
  EXPECT_EQ(asked.exit, ChildExit::exited(1));
  EXPECT_THAT(asked.complaints, HasSubstr("start it with --weights"));
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

TEST_F(DaemonsTest, EventsOfNobodyAreAFailureAndAManagerThatComesIsHeard) {
  const std::string endpoint = "ipc://" + (temp_ / "events").string();
  const Finished alone = run_kvferry({"events", "--endpoint=" + endpoint, "--seconds=1.5"});
  EXPECT_EQ(alone.exit, ChildExit::exited(1));
  EXPECT_THAT(alone.complaints, AllOf(HasSubstr("nobody tells at " + endpoint + "; waiting"),
                                      HasSubstr("FAILED: nobody told anything")));
  ChildProcess listener(
      ChildOptions{.program = KVFERRY_PROGRAM, .arguments = {"events", "--endpoint=" + endpoint}});
  const auto says = [&](const char* text) {
    const ipc::Deadline deadline = soon();
    while (!deadline.expired()) {
      if (listener.stderr_text().find(text) != std::string::npos) return true;
      pollfd end{listener.pidfd(), POLLIN, 0};
      if (::poll(&end, 1, 20) != 0) return false;
    }
    return false;
  };
  ASSERT_TRUE(says("nobody tells")) << listener.stderr_text();
  start("manager", {"--kv-events=" + endpoint});
  EXPECT_TRUE(says("somebody tells")) << listener.stderr_text();
  const std::string nowhere = "ipc://" + (temp_ / "nowhere").string();
  const Finished unanswered =
      run_kvferry({"events", "--endpoint=" + endpoint, "--snapshot=" + nowhere, "--seconds=1.5"});
  EXPECT_EQ(unanswered.exit, ChildExit::exited(1));
  EXPECT_THAT(unanswered.complaints, AllOf(HasSubstr("nobody answers at " + nowhere + "; what is"),
                                           HasSubstr("FAILED: nobody answered at " + nowhere)));
  running_.front()->signal(SIGTERM);
  EXPECT_EQ(running_.front()->wait(soon()), ChildExit::exited(0));
  EXPECT_TRUE(says("any more")) << listener.stderr_text();
}

TEST_F(DaemonsTest, EventsThatCannotBeToldWhereTheyAreToBeEndAManagerForGood) {
  const std::string nowhere = "ipc://" + (temp_ / "absent" / "events").string();
  const std::string here = "ipc://" + (temp_ / "events").string();
  using Options = std::vector<std::string>;
  for (const Options& options :
       {Options{"--kv-events=" + nowhere},
        Options{"--kv-events=" + here, "--kv-events-snapshot=" + nowhere}}) {
    const Finished refused = ask("manager", options);
    EXPECT_EQ(refused.exit, ChildExit::exited(5)) << "starting it again changes nothing";
    const std::string option = options.back().substr(0, options.back().find('='));
    EXPECT_THAT(refused.complaints,
                AllOf(HasSubstr(option + " " + nowhere + ": no socket can be made in " +
                                (temp_ / "absent").string()),
                      HasSubstr("make that folder")));
  }
}

/// Commands of the block that starts an instance on a simulated device, as they are written there.
std::vector<std::vector<std::string>> documented_start(const std::string& file) {
  std::ifstream in(std::string(KVFERRY_DOCUMENTATION "/") + file);
  std::vector<std::vector<std::string>> commands;
  bool has_device = false;
  for (std::string line; std::getline(in, line);) {
    if (line == "```sh") {
      commands.clear();
    } else if (line == "```" && has_device) {
      return commands;
    } else if (line.starts_with("kvferry ")) {
      std::istringstream words(line.substr(line.find(' ')));
      commands.emplace_back(std::istream_iterator<std::string>(words),
                            std::istream_iterator<std::string>());
      has_device |= line.find("--device host:") != std::string::npos;
    }
  }
  return {};
}

TEST_F(DaemonsTest, TheStartInTheDocumentationStartsAnInstanceWithoutAGpu) {
  for (const char* file : {"README.md", "docs/operations.md"}) {
    std::vector<std::vector<std::string>> commands = documented_start(file);
    ASSERT_EQ(commands.size(), 3U) << file;
    for (std::vector<std::string>& arguments : commands) {
      // The device of this test alone.
      for (std::string& argument : arguments) {
        if (argument.starts_with("host:demo:")) argument.replace(5, 4, device_name_);
      }
      running_.push_back(std::make_unique<ChildProcess>(
          ChildOptions{.program = KVFERRY_PROGRAM,
                       .arguments = arguments,
                       .environment = {"KVFERRY_INSTANCE=chat",
                                       "KVFERRY_RUNTIME_DIR=" + (temp_ / "run").string()}}));
    }
    EXPECT_TRUE(wait_status(offload_ready)) << file << running_.back()->stderr_text();
    for (const auto& process : running_) process->signal(SIGTERM);
    for (const auto& process : running_) {
      EXPECT_EQ(process->wait(soon()), ChildExit::exited(0)) << process->stderr_text();
    }
    running_.clear();
  }
}

TEST_F(DaemonsTest, ATraceOfNoInstanceSaysSo) {
  const Finished asked = ask("trace");
  EXPECT_EQ(asked.exit, ChildExit::exited(1));
  EXPECT_THAT(asked.complaints, HasSubstr("is not there"));
}

}  // namespace
}  // namespace kvferry::test
