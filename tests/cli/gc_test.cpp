// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// A host pool whose manager was killed: who keeps it, who gets it, and how it goes.
#include "cli/daemons_fixture.hpp"

#include <gmock/gmock.h>

#include <csignal>
#include <filesystem>
#include <utility>

namespace kvferry::test {
namespace {

using testing::HasSubstr;
using testing::Not;

class GcTest : public DaemonsTest {
 protected:
  void start_all(const std::vector<std::string>& mover_options = {}) {
    start("manager");
    start("worker");
    start("mover", mover_options);
    ASSERT_TRUE(wait_status(offload_ready)) << running_.back()->stderr_text();
  }
  void kill_manager() {
    running_.front()->signal(SIGKILL);
    ASSERT_TRUE(running_.front()->wait(soon()).has_value());
  }
  /// In the place of the first one, which has ended.
  void start_next_manager(const std::vector<std::string>& options = {}) {
    start("manager", options);
    std::swap(running_.front(), running_.back());
    running_.pop_back();
  }
  /// The pools that are kept, once their keeper has noticed what happened to its manager.
  [[nodiscard]] nlohmann::json pools(const std::string& state) const {
    const ipc::Deadline deadline = soon();
    for (;;) {
      const Finished asked = run_kvferry({"gc", "--list", "--json", runtime_dir()});
      const auto found = nlohmann::json::parse(asked.output);
      if (deadline.expired() || (state.empty() && found["pools"].empty()) ||
          (found["pools"].size() == 1 && found["pools"][0]["state"] == state)) {
        return found["pools"];
      }
    }
  }
  [[nodiscard]] Finished collect() const { return run_kvferry({"gc", runtime_dir()}); }
  [[nodiscard]] std::string runtime_dir() const {
    return "--runtime-dir=" + (temp_ / "run").string();
  }
};

TEST_F(GcTest, APoolIsKeptAfterItsManagersDeathUntilItIsCollected) {
  ASSERT_NO_FATAL_FAILURE(start_all());
  EXPECT_EQ(pools("in_use").size(), 1U);
  EXPECT_THAT(collect().output, HasSubstr("in use by its manager"));
  kill_manager();
  const nlohmann::json kept = pools("kept");
  ASSERT_EQ(kept.size(), 1U);
  EXPECT_EQ(kept[0]["holder"], "default.0.keep");
  EXPECT_EQ(kept[0]["pid"], running_.back()->pid());
  EXPECT_EQ(kept[0]["bytes"], 16U << 20U);
  const Finished collected = collect();
  EXPECT_EQ(collected.exit, ChildExit::exited(0));
  EXPECT_THAT(collected.output, HasSubstr("let go"));
  EXPECT_TRUE(pools("").empty());
  EXPECT_THAT(collect().output, HasSubstr("nothing was left behind"));
}

TEST_F(GcTest, AKeeperThatIsStoppedIsNamedAndNotTakenForNone) {
  ASSERT_NO_FATAL_FAILURE(start_all());
  kill_manager();
  ASSERT_EQ(pools("kept").size(), 1U);
  running_.back()->signal(SIGSTOP);
  const Finished looked = run_kvferry({"gc", "--list", "--deadline=300ms", runtime_dir()});
  EXPECT_EQ(looked.exit, ChildExit::exited(1));
  EXPECT_THAT(looked.output, HasSubstr("does not answer"));
  EXPECT_THAT(looked.complaints, HasSubstr("default.0.keep"));
  EXPECT_THAT(looked.complaints, HasSubstr("stopped"));
  running_.back()->signal(SIGCONT);
  EXPECT_EQ(pools("kept").size(), 1U);
}

TEST_F(GcTest, TheNextManagerTakesThePoolAndStatusSaysSo) {
  ASSERT_NO_FATAL_FAILURE(start_all());
  const std::string id = pools("in_use")[0]["pool"];
  kill_manager();
  ASSERT_EQ(pools("kept").size(), 1U);
  start_next_manager();
  ASSERT_TRUE(wait_status([&](const nlohmann::json& status) {
    return offload_ready(status) && status["pool"]["id"] == id &&
           status["pool"]["kept"]["doubtful"] == 0;
  })) << running_.front()->stderr_text();
}

TEST_F(GcTest, AnotherSizeOfPoolIsMadeAnewAndTheKeptOneGoes) {
  ASSERT_NO_FATAL_FAILURE(start_all());
  const std::string id = pools("in_use")[0]["pool"];
  kill_manager();
  ASSERT_EQ(pools("kept").size(), 1U);
  host_memory_ = "32MiB";
  start_next_manager();
  ASSERT_TRUE(wait_status([&](const nlohmann::json& status) {
    return offload_ready(status) && status["pool"]["id"] != id && status["pool"]["kept"].is_null();
  }));
  EXPECT_THAT(running_.front()->stderr_text(), HasSubstr("16.0 MiB"));
  EXPECT_EQ(pools("in_use").size(), 1U);
}

TEST_F(GcTest, AMoverKeepsItNoLongerThanItIsToldTo) {
  ASSERT_NO_FATAL_FAILURE(start_all({"--keep-pool-for=0.2"}));
  kill_manager();
  EXPECT_TRUE(pools("").empty());
  EXPECT_THAT(running_.back()->stderr_text(), HasSubstr("the host pool is let go"));
}

TEST_F(GcTest, AMoverThatIsToldNotToKeepsNothing) {
  ASSERT_NO_FATAL_FAILURE(start_all({"--keep-pool-for=0"}));
  EXPECT_TRUE(pools("").empty());
}

TEST_F(GcTest, AnOrderlyEndGivesThePoolBackUnlessItIsToBeKept) {
  ASSERT_NO_FATAL_FAILURE(start_all());
  running_.front()->signal(SIGTERM);
  EXPECT_EQ(running_.front()->wait(soon()), ChildExit::exited(0));
  EXPECT_TRUE(pools("").empty());
  start_next_manager({"--keep-pool"});
  ASSERT_TRUE(wait_status(offload_ready));
  running_.front()->signal(SIGTERM);
  EXPECT_EQ(running_.front()->wait(soon()), ChildExit::exited(0));
  EXPECT_EQ(pools("kept").size(), 1U);
}

TEST_F(GcTest, WhatAnInstanceThatIsGoneLeftIsRemovedByName) {
  start("manager");
  ASSERT_TRUE(wait_status([](const nlohmann::json& status) { return status.contains("pool"); }));
  kill_manager();
  const Finished collected = collect();
  EXPECT_THAT(collected.output, HasSubstr("chat/manager: removed"));
  EXPECT_THAT(collected.output, HasSubstr("chat/registry: removed"));
  EXPECT_THAT(collected.output, HasSubstr("chat: removed"));
  EXPECT_FALSE(std::filesystem::exists(temp_ / "run" / "chat")) << "sockets, records";
  EXPECT_THAT(collect().output, HasSubstr("nothing was left behind"));
  const Finished elsewhere = run_kvferry({"gc", "--runtime-dir=" + (temp_ / "nowhere").string()});
  EXPECT_EQ(elsewhere.exit, ChildExit::exited(0));
}

TEST_F(GcTest, WhatSomebodyIsInStays) {
  ASSERT_NO_FATAL_FAILURE(start_all());
  kill_manager();
  const Finished collected = collect();
  EXPECT_EQ(collected.exit, ChildExit::exited(0));
  EXPECT_THAT(collected.output, HasSubstr("chat/manager: removed"));
  EXPECT_THAT(collected.output, Not(HasSubstr("chat: removed")));
  // The dead one's records, too: its peers are there to be looked at beside them.
  EXPECT_THAT(ask("trace").output, HasSubstr("manager"));
}

TEST_F(GcTest, AnInstanceThatIsNotThereIsNotSaidToBeWell) {
  for (const bool only_looks : {true, false}) {
    std::vector<std::string> arguments = {"gc", runtime_dir(), "--instance=nope"};
    if (only_looks) arguments.emplace_back("--list");
    const Finished asked = run_kvferry(arguments);
    EXPECT_EQ(asked.exit, ChildExit::exited(1));
    EXPECT_EQ(asked.output, "");
    EXPECT_THAT(asked.complaints, HasSubstr("instance nope"));
    EXPECT_THAT(asked.complaints, HasSubstr("is not there"));
  }
  EXPECT_FALSE(std::filesystem::exists(temp_ / "run" / "nope"));
}

}  // namespace
}  // namespace kvferry::test
