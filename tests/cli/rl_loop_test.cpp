// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Whole RL loops: every process is real, and the engine is the reference workers' own.
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>

#include <csignal>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace kvferry::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kIterations = 6;

class RlLoopTest : public ReplayTest {
 protected:
  [[nodiscard]] std::vector<std::string> loop_arguments(std::vector<std::string> more) const {
    std::vector<std::string> arguments = {"rl-loop",
                                          "--device=host",
                                          "--runtime-dir=" + path("run"),
                                          "--ranks=2",
                                          "--iterations=" + std::to_string(kIterations),
                                          "--requests-per-iteration=8",
                                          "--weights-size=1MiB",
                                          "--report=" + path("report.json"),
                                          "--plot=" + path("memory.svg")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  /// Runs to a good end and returns the report.
  json loop(const std::vector<std::string>& more) {
    finished_ = run_kvferry(loop_arguments(more));
    EXPECT_EQ(finished_.exit, ChildExit::exited(0)) << finished_.complaints;
    json report = this->report();
    EXPECT_TRUE(report.is_object());
    EXPECT_THAT(report["failures"], IsEmpty());
    EXPECT_EQ(report["corrupt"], 0);
    EXPECT_EQ(report["leaked_device_bytes"], 0);
    EXPECT_EQ(report["leaked_host_bytes"], 0);
    EXPECT_EQ(report["leftover_names"], 0) << report["leftover_paths"];
    EXPECT_EQ(report["requests"]["unanswered"], 0);
    EXPECT_EQ(report["requests"]["submitted"], 8 * kIterations);
    EXPECT_EQ(report["requests"]["finished"].get<int>() + report["requests"]["aborted"].get<int>(),
              8 * kIterations);
    EXPECT_EQ(report["iterations"].size(), kIterations);
    return report;
  }
  static int sum(const json& report, const char* field) {
    int total = 0;
    for (const json& iteration : report["iterations"]) total += iteration[field].get<int>();
    return total;
  }
  /// Empties for one reason, of each rank.
  static std::vector<int> empties(const json& report, const char* reason) {
    std::vector<int> counts;
    for (const json& rank : report["empties"]) counts.push_back(rank[reason].get<int>());
    return counts;
  }

  Finished finished_;
};

class RlLoopModeTest : public RlLoopTest,
                       public testing::WithParamInterface<std::tuple<const char*, const char*>> {};

TEST_P(RlLoopModeTest, UpdatesAndAnswersAndKeepsNothingAtContinues) {
  const auto& [mode_name, source] = GetParam();
  const std::string mode = mode_name;
  const json report = loop({"--mode=" + mode, std::string("--update=") + source});
  for (const json& iteration : report["iterations"]) {
    EXPECT_EQ(iteration["mode"], mode);
    EXPECT_TRUE(iteration["done"]);
    EXPECT_GE(iteration["reserved_before"], iteration["reserved_after"]);
    EXPECT_GE(iteration["reserved_after"], iteration["used_after"]);
    EXPECT_GT(iteration["used_after"], 1 << 20) << "the weights";
    EXPECT_GT(iteration["free_on_device"], 0);
    EXPECT_GT(iteration["update_ms"], 0);
    EXPECT_TRUE(iteration["clear_ms"].is_null());
    EXPECT_EQ(iteration["ranks"].size(), 2U);
  }
  for (std::size_t i = 4; i < report["iterations"].size(); ++i) {
    EXPECT_EQ(report["iterations"][i]["reserved_after"], report["iterations"][3]["reserved_after"]);
  }
  // Three versions take turns: an identity comes back, and is the same.
  std::set<std::string> identities;
  for (const json& iteration : report["iterations"]) identities.insert(iteration["weights_id"]);
  EXPECT_EQ(identities.size(), 3U);
  EXPECT_EQ(report["iterations"][0]["weights_id"], report["iterations"][3]["weights_id"]);
  EXPECT_THAT(empties(report, "continue"), testing::Each(kIterations));
  EXPECT_THAT(empties(report, "update"), testing::Each(0));
  const bool lent = std::string(source) == "ipc";
  EXPECT_EQ(report["settings"]["lenders"], lent ? 6 : 0) << "each rank has a device of its own";
  EXPECT_EQ(report["settings"]["lent_bytes"], lent ? 6 * (2 << 20) : 0);
  EXPECT_EQ(report["transport"], std::string(source) == "distributed" ? "host" : "");
  EXPECT_GT(report["verified"], 0);
  EXPECT_LT(report["requests"]["equal_prompts"], report["requests"]["compared_prompts"]);
  EXPECT_EQ(sum(report, "finished"), report["requests"]["finished"]);
  if (mode == "abort") {
    EXPECT_GT(report["requests"]["aborted"], 0);
  } else {
    EXPECT_EQ(report["requests"]["aborted"], 0);
    EXPECT_GT(report["requests"]["mixed_weights"], 0) << "some were written across an update";
  }
  if (mode == "retract") {
    EXPECT_GT(sum(report, "retracted"), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes,
                         RlLoopModeTest,
                         testing::Combine(testing::Values("abort", "retract", "in_place"),
                                          testing::Values("disk", "tensor", "distributed", "ipc")),
                         [](const auto& name) {
                           return std::string(std::get<0>(name.param)) + "_" +
                                  std::get<1>(name.param);
                         });

TEST_F(RlLoopTest, WorkersTakeMessagesWhenToldOnTheirCommandLineOrInTheirEnvironment) {
  // A rank that was not filled in is no time, and the worker would not start.
  for (const char* told : {"--weights-broadcast=messages",
                           "--worker-environment=KVFERRY_WEIGHTS_BROADCAST=messages,"
                           "KVFERRY_IDLE_TRIM=6{rank}s"}) {
    const json report = loop({"--update=distributed", told});
    EXPECT_EQ(report["transport"], "messages") << told;
    EXPECT_GT(report["verified"], 0);
  }
}

// The trainer has the device meanwhile: nothing of it is the engine's, and every answer stays
// right.
TEST_F(RlLoopTest, EverythingIsReleasedAndResumedEachTime) {
  const json report = loop({"--release", "--mode=abort"});
  std::uint64_t most_free = 0;
  for (const json& iteration : report["iterations"]) {
    EXPECT_TRUE(iteration["done"]);
    EXPECT_GT(iteration["release_ms"], 0);
    EXPECT_GT(iteration["resume_ms"], 0);
    EXPECT_GT(iteration["free_while_released"], iteration["free_on_device_least"]);
    most_free = std::max(most_free, iteration["free_while_released"].get<std::uint64_t>());
  }
  EXPECT_EQ(report["iterations"].back()["free_while_released"], most_free) << "it shrinks";
  EXPECT_THAT(empties(report, "clear"), testing::Each(kIterations)) << "once for each release";
  EXPECT_THAT(empties(report, "release"), testing::Each(0));
  EXPECT_THAT(empties(report, "continue"), testing::Each(kIterations));
  EXPECT_GT(report["verified"], 0);
}

TEST_F(RlLoopTest, WithoutEmptyingNothingIsGivenBack) {
  const json report = loop({"--no-empty-cache"});
  EXPECT_THAT(empties(report, "continue"), testing::Each(0));
  EXPECT_EQ(report["settings"]["empty_cache"], false);
  const std::uint64_t high = report["high_water_bytes"];
  EXPECT_EQ(report["iterations"][kIterations - 1]["reserved_after"], high);
}

class RlLoopClearTest : public RlLoopTest, public testing::WithParamInterface<const char*> {};

TEST_P(RlLoopClearTest, TheCacheIsClearedAndComesBackInEveryIteration) {
  const json report = loop({"--clear", std::string("--mode=") + GetParam()});
  for (const json& iteration : report["iterations"]) {
    EXPECT_GT(iteration["clear_ms"], 0);
    EXPECT_GT(iteration["reinit_ms"], 0);
  }
  EXPECT_THAT(empties(report, "clear"), testing::Each(kIterations));
  EXPECT_GT(report["verified"], 0);
}

INSTANTIATE_TEST_SUITE_P(Modes,
                         RlLoopClearTest,
                         testing::Values("abort", "retract", "in_place"),
                         [](const auto& mode) { return std::string(mode.param); });

// What is lent stays on the device while everything of the engine's goes and comes back.
TEST_F(RlLoopTest, LentWeightsOutliveClearsAndReleases) {
  const json report =
      loop({"--update=ipc", "--clear", "--release", "--handles=legacy", "--cache-owner=mover"});
  EXPECT_THAT(finished_.complaints, HasSubstr("2 workers, 6 lenders"));
  EXPECT_THAT(finished_.complaints, HasSubstr("v0-r{rank}, v1-r{rank}, v2-r{rank}; 2.00 MiB"));
  for (const json& iteration : report["iterations"]) {
    EXPECT_TRUE(iteration["done"]);
    EXPECT_GT(iteration["update_ms"], 0);
    EXPECT_GT(iteration["clear_ms"], 0);
    EXPECT_GT(iteration["release_ms"], 0);
    EXPECT_EQ(iteration["free_while_released"], report["iterations"][0]["free_while_released"]);
  }
  EXPECT_THAT(empties(report, "continue"), testing::Each(kIterations));
  EXPECT_GT(report["verified"], 0);
}

TEST_F(RlLoopTest, SimulatedDevicesHaveRoomForTheLenders) {
  const auto free_at_the_end = [this](const std::string& update) {
    return loop({"--update=" + update})["iterations"].back()["free_on_device"];
  };
  EXPECT_EQ(free_at_the_end("ipc"), free_at_the_end("disk"));
}

// An update that needs it fails, one that comes after its successor does not.
TEST_F(RlLoopTest, AKilledLenderIsNamedAndNothingOfItStays) {
  running_.emplace(
      ChildOptions{.program = KVFERRY_PROGRAM,
                   .arguments = loop_arguments({"--iterations=100000", "--update=ipc"})});
  ASSERT_TRUE(wait_until([this] {
    const json now = status("rl");
    return now.is_object() && now["engines"].size() == 1 &&
           now["engines"][0]["updates"].get<int>() >= 2;
  })) << running_->stderr_text();
  const auto before = children();
  ASSERT_EQ(before.size(), 11U);
  const auto& lender = before.at("export-weights/v0-r1");
  ASSERT_TRUE(lender.signal(SIGKILL));
  const std::string died = "lender/v0-r1 (pid " + std::to_string(lender.pid()) + ") died";
  const auto seen = [&] { return running_->stderr_text().find(died) != std::string::npos; };
  (void)wait_until(seen);  // False, too, when it has ended for it.
  EXPECT_TRUE(seen()) << running_->stderr_text();
  running_->signal(SIGTERM);
  EXPECT_EQ(finish_replay(), ChildExit::exited(1));
  const json report = this->report();
  EXPECT_THAT(report["errors"][0].get<std::string>(),
              testing::AnyOf(HasSubstr("interrupted"), HasSubstr("v0-r1")));
  EXPECT_EQ(report["corrupt"], 0);
  EXPECT_EQ(report["leaked_device_bytes"], 0);
  EXPECT_EQ(report["leaked_host_bytes"], 0);
  EXPECT_EQ(report["leftover_names"], 0) << report["leftover_paths"];
}

TEST_F(RlLoopTest, WithoutUpdatesTheWeightsStay) {
  const json report = loop({"--update=none"});
  for (const json& iteration : report["iterations"]) {
    EXPECT_TRUE(iteration["update_ms"].is_null());
    EXPECT_EQ(iteration["weights_version"], 0);
  }
  EXPECT_EQ(report["requests"]["mixed_weights"], 0);
  EXPECT_GT(report["verified"], 0);
}

TEST_F(RlLoopTest, ShowsWhatItDoesAndDrawsIt) {
  loop({"--ranks=1", "--seed=3"});
  EXPECT_THAT(finished_.complaints, HasSubstr("kvferry rl-loop"));
  EXPECT_THAT(finished_.complaints, HasSubstr("look at it"));
  EXPECT_THAT(finished_.output, HasSubstr("answers verified"));
  std::ifstream file(path("memory.svg"));
  std::ostringstream svg;
  svg << file.rdbuf();
  EXPECT_THAT(svg.str(), HasSubstr("1 rank of tiny on host"));
  EXPECT_THAT(svg.str(), HasSubstr("</svg>"));
  std::error_code error;
  EXPECT_TRUE(std::filesystem::is_empty(path("run"), error)) << "it took its directory away";
}

TEST_F(RlLoopTest, ASignalEndsItInAnOrderlyWay) {
  running_.emplace(ChildOptions{.program = KVFERRY_PROGRAM,
                                .arguments = loop_arguments({"--iterations=100000"})});
  ASSERT_TRUE(wait_until([this] { return children().size() == 5; })) << running_->stderr_text();
  const auto process = ipc::ProcessRef::of_pid(running_->pid());
  ASSERT_TRUE(process);
  ASSERT_TRUE(process->signal(SIGTERM));
  EXPECT_EQ(finish_replay(), ChildExit::exited(1));
  const json report = this->report();
  EXPECT_THAT(report["errors"][0].get<std::string>(), HasSubstr("interrupted by signal 15"));
  EXPECT_EQ(report["leaked_device_bytes"], 0);
  EXPECT_EQ(report["leftover_names"], 0) << report["leftover_paths"];
}

TEST_F(RlLoopTest, AKilledWorkerEndsTheLoopWithWhatIsMissing) {
  running_.emplace(ChildOptions{.program = KVFERRY_PROGRAM,
                                .arguments = loop_arguments({"--iterations=100000"})});
  ASSERT_TRUE(wait_until([this] {
    const json now = status("rl");
    return now.is_object() && now["engines"].size() == 1 &&
           now["engines"][0]["updates"].get<int>() >= 2;
  })) << running_->stderr_text();
  const auto before = children();
  ASSERT_TRUE(before.at("worker/0").signal(SIGKILL));
  EXPECT_EQ(finish_replay(), ChildExit::exited(1));
  EXPECT_THAT(running_->stderr_text(), HasSubstr("worker/0"));
  const json report = this->report();
  EXPECT_THAT(report["errors"], testing::Not(IsEmpty()));
  EXPECT_EQ(report["leaked_device_bytes"], 0);
  EXPECT_EQ(report["leftover_names"], 0) << report["leftover_paths"];
}

TEST_F(RlLoopTest, AWrongUseIsToldBeforeAnythingStarts) {
  const auto refused = [](const std::vector<std::string>& more, const char* why) {
    std::vector<std::string> arguments = {"rl-loop", "--device=host"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished done = run_kvferry(arguments);
    EXPECT_EQ(done.exit, ChildExit::exited(2)) << more.front();
    EXPECT_THAT(done.complaints, HasSubstr(why));
  };
  refused({"--mode=gently"}, "'gently' is none of abort|retract|in_place");
  refused({"--update=nowhere"}, "'nowhere' is none of disk|tensor|distributed|ipc|none");
  refused({"--release", "--mode=in_place"}, "frozen requests hold blocks");
  refused({"--iterations=0"}, "--iterations");
  refused({"--plot=/dev/null/m.svg"}, "/dev/null/m.svg");
  refused({"--weights-size=lots"}, "lots");
  refused({"--worker-environment=A=1,B"}, "'B' is not of the form NAME=VALUE");
  const Finished too_large = run_kvferry({"rl-loop", "--device=host", "--update=ipc",
                                          "--weights-size=64TiB", "--runtime-dir=" + path("run")});
  EXPECT_EQ(too_large.exit, ChildExit::exited(1));
  EXPECT_THAT(too_large.complaints, HasSubstr("are free: give less --weights-size"));
}

}  // namespace
}  // namespace kvferry::test
