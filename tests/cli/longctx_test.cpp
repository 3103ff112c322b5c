// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Long contexts on small simulated devices: every process is real, and outputs depend on every
// byte.
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>

#include <csignal>
#include <string>
#include <utility>
#include <vector>

namespace kvferry::test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

class LongctxTest : public ReplayTest {
 protected:
  [[nodiscard]] std::vector<std::string> longctx_arguments(std::vector<std::string> more) const {
    std::vector<std::string> arguments = {
        "longctx",    "--device=host", "--context=500", "--sequences=9",
        "--steps=40", "--slice=7",     "--json",        "--runtime-dir=" + path("run")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }
  static json parsed(const std::string& output) {
    json report = json::parse(output, nullptr, false);
    EXPECT_TRUE(report.is_object()) << output;
    EXPECT_EQ(report["leaked_device_bytes"], 0);
    EXPECT_EQ(report["leaked_host_bytes"], 0);
    EXPECT_THAT(report["leftover_names"], IsEmpty());
    return report;
  }
  json longctx(std::vector<std::string> more) {
    const Finished finished = run_kvferry(longctx_arguments(std::move(more)));
    EXPECT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
    return parsed(finished.output);
  }
  /// Starts one that a test disturbs, and returns when its sequences take turns.
  void start_long(std::vector<std::string> more) {
    more.insert(more.end(), {"--no-check", "--context=1000"});
    running_.emplace(
        ChildOptions{.program = KVFERRY_PROGRAM, .arguments = longctx_arguments(std::move(more))});
    ASSERT_TRUE(wait_until([this] {
      return running_->stderr_text().find("take turns") != std::string::npos;
    })) << running_->stderr_text();
  }
  /// Stops the engine, and returns when what is in host memory by then outlives its manager.
  void stop_when_all_has_checksums() {
    running_->signal(SIGSTOP);
    ASSERT_TRUE(wait_until([this] {
      const json now = status("longctx");
      if (now.is_null()) return false;
      const json& jobs = now["engines"][0]["jobs"];
      return jobs["queued"] == 0 && jobs["running"] == 0 &&
             now["pool"]["integrity"]["awaited"] == 0;
    }));
  }
  json end_of_long() {
    std::string output;
    while (auto line = running_->read_line(ipc::Deadline::after(std::chrono::minutes(3)))) {
      output += *line + "\n";
    }
    return parsed(output);
  }
};

TEST_F(LongctxTest, OutputsAreThoseOfADeviceThatHoldsAllOfThem) {
  const json report = longctx({});
  EXPECT_EQ(report["outputs_equal"], true);
  EXPECT_EQ(report["context"], 500);
  EXPECT_EQ(report["sequences"], 9);
  EXPECT_GE(report["oversubscription"], 4);
  for (const json& run : {report, report["without_lookahead"]}) {
    EXPECT_GT(run["bytes_to_host"], 0);
    EXPECT_GT(run["bytes_to_device"], run["bytes_to_host"]) << "whole blocks are stored once";
    EXPECT_GT(run["prefill_bytes_to_host"], 0);
    EXPECT_GT(run["tokens_per_s"], 0);
    EXPECT_GE(run["waiting_s"], 0);
    EXPECT_TRUE(run["bound_s"].is_null()) << "none is known of a simulated device";
    EXPECT_EQ(run["turns"], 9 * 6) << "40 steps in slices of 7";
    EXPECT_EQ(run["failed_jobs"], 0);
  }
  EXPECT_GT(report["tokens_per_s_no_swap"], 0);
  EXPECT_GT(report["link_gbps"]["h2d"], 0);
  EXPECT_THAT(report["errors"], IsEmpty());
}

TEST_F(LongctxTest, SeveralRanksAndGroupsAndALittleOfTheDeviceActive) {
  const json report = longctx({"--ranks=2", "--geometry=tiny-draft", "--active=0.3",
                               "--sequences=12", "--gpu-blocks=100", "--arena=block-first"});
  EXPECT_EQ(report["outputs_equal"], true);
  EXPECT_GE(report["oversubscription"], 4);
  EXPECT_GT(report["bytes_to_device"], 0);
}

TEST_F(LongctxTest, ADeviceThatHoldsOneSequenceIsEnough) {
  const json report = longctx({"--gpu-blocks=34", "--sequences=3", "--steps=9", "--slice=3"});
  EXPECT_EQ(report["outputs_equal"], true);
  EXPECT_EQ(report["sequence_blocks"], 32);
}

TEST_F(LongctxTest, SequencesThatAreLargerThanTheDeviceComputeInWindows) {
  const json report = longctx({"--gpu-blocks=10", "--sequences=3", "--steps=9", "--slice=3"});
  EXPECT_EQ(report["outputs_equal"], true);
  EXPECT_EQ(report["in_windows"], true);
  EXPECT_EQ(report["no_swap"], "large arena");
  const std::uint64_t block = report["block_bytes"];
  for (const json& run : {report, report["without_lookahead"]}) {
    EXPECT_EQ(run["tokens_per_s"].is_number(), true);
    EXPECT_GE(run["bytes_in_turns"], 3 * 9 * (32 - 10 - 1) * block)
        << "each token, but for what its turn has loaded before";
    EXPECT_LE(run["bytes_to_device"], 3 * 9 * (32 - 10) * block + 3 * 3 * 10 * block)
        << "no token loads more than the device does not hold";
  }
}

TEST_F(LongctxTest, ASequenceGrowsLargerThanTheDeviceOnSeveralRanks) {
  const json report = longctx({"--gpu-blocks=33", "--sequences=3", "--steps=60", "--slice=20",
                               "--ranks=2", "--geometry=tiny-draft"});
  EXPECT_EQ(report["outputs_equal"], true);
  EXPECT_EQ(report["in_windows"], true);
  EXPECT_EQ(report["sequence_blocks"], 35);
  EXPECT_GT(report["bytes_in_turns"], 0);
}

TEST_F(LongctxTest, WindowsGoOnOverTheDeathOfAMover) {
  start_long({"--steps=60", "--gpu-blocks=20"});
  ASSERT_TRUE(children().at("mover/0").signal(SIGKILL));
  const json report = end_of_long();
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  EXPECT_EQ(report["outputs_equal"], true) << "with and without look-ahead";
  EXPECT_THAT(running_->stderr_text(), HasSubstr("died: killed by signal 9"));
}

TEST_F(LongctxTest, TheSeedDecidesWhatIsComputedAndTextTellsThatNoBoundIsKnown) {
  std::vector<std::string> arguments = longctx_arguments({"--steps=8", "--seed=3"});
  std::erase(arguments, "--json");
  const Finished finished = run_kvferry(arguments);
  EXPECT_EQ(finished.exit, ChildExit::exited(0)) << finished.complaints;
  EXPECT_THAT(finished.output,
              AllOf(HasSubstr("no swap"), HasSubstr("look-ahead"), HasSubstr("without"),
                    HasSubstr("bit for bit: equal"), HasSubstr("bound: none is known")));
}

TEST_F(LongctxTest, HostMemoryThatIsTooSmallIsToldBeforeAnythingStarts) {
  const Finished finished = run_kvferry(longctx_arguments({"--host-memory=2MiB"}));
  EXPECT_EQ(finished.exit, ChildExit::exited(2));
  EXPECT_THAT(finished.complaints,
              AllOf(HasSubstr("--host-memory gives 2.00 MiB"), HasSubstr("need 9.84 MiB")));
  EXPECT_THAT(finished.output, IsEmpty());
}

TEST_F(LongctxTest, CopiesOfAKilledMoverAreMadeAgain) {
  start_long({"--steps=200"});
  ASSERT_TRUE(children().at("mover/0").signal(SIGKILL));
  const json report = end_of_long();
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  EXPECT_EQ(report["outputs_equal"], true) << "with and without look-ahead";
  EXPECT_THAT(running_->stderr_text(), HasSubstr("died: killed by signal 9"));
}

TEST_F(LongctxTest, TheDeathOfTheWorkerEndsItWithAReason) {
  start_long({"--steps=2000"});
  ASSERT_TRUE(children().at("worker/0").signal(SIGKILL));
  const json report = end_of_long();
  EXPECT_EQ(finish_replay(), ChildExit::exited(1));
  ASSERT_EQ(report["errors"].size(), 1U);
  EXPECT_THAT(report["errors"][0].get<std::string>(),
              testing::AnyOf(HasSubstr("died before it answered"), HasSubstr("has no worker"),
                             HasSubstr("device blocks are gone")));
}

/// Blocks on the device, and how long it goes on.
using SizeAndSteps = std::pair<const char*, const char*>;

class LongctxManagerTest : public LongctxTest, public testing::WithParamInterface<SizeAndSteps> {};

TEST_P(LongctxManagerTest, ItGoesOnOverTheDeathOfTheManager) {
  start_long({GetParam().first, GetParam().second});
  ASSERT_NO_FATAL_FAILURE(stop_when_all_has_checksums());
  const pid_t killed = children().at("manager").pid();
  ASSERT_TRUE(children().at("manager").signal(SIGKILL));
  running_->signal(SIGCONT);
  // The next one found sequences, and copies go on.
  ASSERT_TRUE(wait_until([&] {
    const json now = status("longctx");
    return !now.is_null() && now["pid"] != killed && now["pool"]["kept"].is_object();
  })) << running_->stderr_text();
  const json report = end_of_long();
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  EXPECT_EQ(report["outputs_equal"], true) << "with and without look-ahead";
  EXPECT_THAT(report["errors"], IsEmpty());
  EXPECT_THAT(running_->stderr_text(), HasSubstr("died: killed by signal 9"));
}

INSTANTIATE_TEST_SUITE_P(Turns,
                         LongctxManagerTest,
                         testing::Values(SizeAndSteps{"--gpu-blocks=150", "--steps=200"},
                                         SizeAndSteps{"--gpu-blocks=20", "--steps=60"}),
                         [](const auto& sizes) {
                           return std::string(sizes.index == 0 ? "Whole" : "InWindows");
                         });

// Nobody else keeps a pool than the movers.
TEST_F(LongctxTest, TheDeathsOfTheManagerAndTheMoverEndItWithTheSequenceThatIsLost) {
  start_long({"--steps=2000"});
  running_->signal(SIGSTOP);
  ASSERT_TRUE(children().at("mover/0").signal(SIGKILL));
  ASSERT_TRUE(children().at("manager").signal(SIGKILL));
  running_->signal(SIGCONT);
  const json report = end_of_long();
  EXPECT_EQ(finish_replay(), ChildExit::exited(1));
  ASSERT_EQ(report["errors"].size(), 1U);
  EXPECT_THAT(report["errors"][0].get<std::string>(),
              AllOf(HasSubstr("is lost"), HasSubstr("could not be loaded"),
                    HasSubstr("this one has taken over no pool")));
}

TEST_F(LongctxTest, ASignalEndsItAndNothingIsLeft) {
  start_long({"--steps=2000"});
  running_->signal(SIGTERM);
  const json report = end_of_long();
  EXPECT_EQ(finish_replay(), ChildExit::exited(1));
  EXPECT_THAT(report["errors"][0].get<std::string>(), HasSubstr("interrupted"));
}

}  // namespace
}  // namespace kvferry::test
