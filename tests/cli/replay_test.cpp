// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>

namespace kvferry::test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

void expect_clean(const json& report) {
  ASSERT_TRUE(report.is_object()) << "no report";
  EXPECT_EQ(report["blocks_corrupt"], 0);
  EXPECT_EQ(report["leaked_device_bytes"], 0);
  EXPECT_EQ(report["leaked_host_bytes"], 0);
  EXPECT_EQ(report["leftover_names"], 0) << report["leftover_paths"];
  EXPECT_TRUE(report["error"].is_null()) << report["error"];
}

/// Owner (engine: a worker that registers its own memory), handles, arena.
using Setup = std::tuple<std::string, std::string, std::string>;

class ReplaySetupTest : public ReplayTest, public testing::WithParamInterface<Setup> {};

TEST_P(ReplaySetupTest, ServesVerifiesAndLeavesNothingWithClearsUnderTraffic) {
  const auto& [owner, handles, arena] = GetParam();
  const bool engine = owner == "engine";
  const Finished run =
      replay(write_trace(150), {"--clear-every=40", "--cache-owner=" + (engine ? "worker" : owner),
                                engine ? "--arena-memory=engine" : "--arena-memory=kvferry",
                                "--handles=" + handles, "--arena=" + arena});
  ASSERT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  const json report = this->report();
  expect_clean(report);
  EXPECT_EQ(report["requests"], 150);
  EXPECT_EQ(report["block_references"], 150 * 6 + 30 * 2 * (0 + 1 + 2 + 3 + 4));
  EXPECT_GT(report["hits_host"], 0);
  EXPECT_GT(report["blocks_verified"], 0);
  EXPECT_EQ(report["clears"], 150 / 40);
  EXPECT_EQ(report["clears"], report["reinits"]);
  EXPECT_GT(report["clear_ms"]["p50"], 0);
  ASSERT_EQ(report["clear_memory"].size(), 150U / 40);
  for (const json& clear : report["clear_memory"]) {
    for (const json& device : clear["devices"]) {
      EXPECT_GT(device["arena_bytes"], 0) << clear;
      EXPECT_GE(device["seen_free_after"].get<std::int64_t>() -
                    device["seen_free_before"].get<std::int64_t>(),
                device["arena_bytes"].get<std::int64_t>())
          << clear;
      EXPECT_EQ(device["free_after"], device["seen_free_after"]) << clear;
    }
  }
  EXPECT_EQ(report["arena_memory"], engine ? "engine" : "kvferry");
  EXPECT_EQ(report["quarantined"], 0);
  EXPECT_EQ(report["restarts"], 0);
  EXPECT_GT(report["bytes_to_host"], 0);
  EXPECT_GT(report["bytes_to_device"], 0);
}

INSTANTIATE_TEST_SUITE_P(All,
                         ReplaySetupTest,
                         testing::Combine(testing::Values("worker", "mover", "engine"),
                                          testing::Values("vmm", "legacy"),
                                          testing::Values("layer-first", "block-first")),
                         [](const auto& setup) {
                           std::string name = std::get<0>(setup.param) + "_" +
                                              std::get<1>(setup.param) + "_" +
                                              std::get<2>(setup.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

class ReplayGeometryTest : public ReplayTest, public testing::WithParamInterface<std::string> {};

TEST_P(ReplayGeometryTest, ServesAndVerifiesEveryGroup) {
  const Finished run = replay(write_trace(150), {"--geometry=" + GetParam(), "--gpu-blocks=150"});
  ASSERT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  const json report = this->report();
  expect_clean(report);
  EXPECT_EQ(report["requests"], 150);
  EXPECT_GT(report["hits_host"], 0);
  EXPECT_GT(report["blocks_verified"], 0);
}

INSTANTIATE_TEST_SUITE_P(
    All,
    ReplayGeometryTest,
    testing::Values("tiny-mla", "tiny-fp8", "tiny-draft", "tiny-window", "tiny-state"),
    [](const auto& geometry) {
      std::string name = geometry.param;
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

TEST_F(ReplayTest, WithRoomForEverythingTheHitRateIsWhatTheTraceHolds) {
  // Four turns of 6, 8, 10 and 12 blocks in 30 sessions: all but the new blocks hit, and the very
  // first block is shared by all.
  const Finished run = replay(write_trace(120), {"--gpu-blocks=120", "--in-flight=1"});
  ASSERT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  const json report = this->report();
  const int references = 30 * (6 + 8 + 10 + 12);
  const int distinct = 1 + 30 * 11;
  EXPECT_EQ(report["block_references"], references);
  EXPECT_EQ(report["hits_device"].get<int>() + report["hits_host"].get<int>(),
            references - distinct);
  EXPECT_EQ(report["stores"], distinct);
}

TEST_F(ReplayTest, AMadeUpWorkloadRepeatsFromItsSeed) {
  const std::vector<std::string> arguments = {"replay",
                                              "--device=host",
                                              "--requests=150",
                                              "--seed=3",
                                              "--in-flight=1",
                                              "--runtime-dir=" + path("run"),
                                              "--report=" + path("report.json")};
  Finished run = run_kvferry(arguments);
  ASSERT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  const json first = report();
  run = run_kvferry(arguments);
  ASSERT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  const json again = report();
  for (const char* name : {"block_references", "hits_device", "hits_host", "stores"}) {
    EXPECT_EQ(first[name], again[name]) << name;
  }
}

TEST_F(ReplayTest, AMoverThatOwnsTheCacheCannotUseAnEnginesMemory) {
  const Finished run = replay(write_trace(30), {"--cache-owner=mover", "--arena-memory=engine"});
  EXPECT_EQ(run.exit, ChildExit::exited(2));
  EXPECT_THAT(run.complaints,
              AllOf(HasSubstr("--arena-memory engine"), HasSubstr("--cache-owner worker")));
}

TEST_F(ReplayTest, AMalformedLineIsNamedAndEndsTheRun) {
  const std::string trace = write_trace(60, 20);
  std::ofstream(trace, std::ios::app) << "{\"timestamp\": 1}\n";
  const Finished run = replay(trace);
  EXPECT_EQ(run.exit, ChildExit::exited(1));
  EXPECT_THAT(run.complaints, HasSubstr("trace.jsonl:61: \"input_length\" is missing"));
}

TEST_F(ReplayTest, ARequestThatIsDueBeyondAllClocksEndsTheRunBeforeItStarts) {
  const std::string trace = write_trace(40);
  std::ofstream(trace, std::ios::app)
      << R"({"timestamp": 9007199254740992, "input_length": 512, "output_length": 1, )"
      << R"("hash_ids": [1]})" << '\n';
  const Finished finished = replay(trace, {"--speed=2"});
  EXPECT_EQ(finished.exit, ChildExit::exited(1));
  EXPECT_THAT(finished.complaints, AllOf(HasSubstr("request 41"), HasSubstr("9007199254740992"),
                                         HasSubstr("at --speed 2")));
  EXPECT_FALSE(std::filesystem::exists(path("report.json")));
}

TEST_F(ReplayTest, SkipBadCountsMalformedLinesAndGoesOn) {
  const std::string trace = write_trace(60, 20);
  std::ofstream(trace, std::ios::app) << "{\"timestamp\": 1}\n";
  const Finished run = replay(trace, {"--skip-bad"});
  EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  EXPECT_EQ(report()["skipped_lines"], 1);
  EXPECT_EQ(report()["requests"], 60);
}

TEST_F(ReplayTest, FailsWhenNothingWasLoadedBack) {
  const Finished run = replay(write_trace(10, 10));
  EXPECT_EQ(run.exit, ChildExit::exited(1));
  EXPECT_THAT(run.complaints, HasSubstr("nothing was ever loaded back"));
}

TEST_F(ReplayTest, RefusesADeviceThatDoesNotHoldTheLongestRequest) {
  const Finished run = replay(write_trace(60, 20), {"--gpu-blocks=8"});
  EXPECT_EQ(run.exit, ChildExit::exited(1));
  EXPECT_THAT(run.complaints, HasSubstr("the longest request needs 11 device blocks"));
}

TEST_F(ReplayTest, AReportThatCannotBeWrittenIsToldBeforeTheRun) {
  const Finished run = replay(write_trace(60, 20), {"--report=/dev/null/report.json"});
  EXPECT_EQ(run.exit, ChildExit::exited(2));
  EXPECT_THAT(run.complaints, HasSubstr("/dev/null/report.json"));
  EXPECT_EQ(run.output, "");
}

TEST_F(ReplayTest, MoreMemoryThanThereIsIsRefusedBeforeAnythingStarts) {
  const Finished run = replay(write_trace(60, 20), {"--host-memory=100TiB"});
  EXPECT_EQ(run.exit, ChildExit::exited(1));
  EXPECT_THAT(run.complaints, HasSubstr("100.0 TiB of host memory"));
  EXPECT_THAT(run.complaints, Not(HasSubstr("died")));
  EXPECT_EQ(run.output, "") << "a summary of nothing";
}

TEST_F(ReplayTest, AProcessThatCannotRunAsStartedIsNotStartedAgain) {
  // Not an option of replay: only the manager, which gets our environment, stumbles over it.
  ChildProcess child({.program = KVFERRY_PROGRAM,
                      .arguments = replay_arguments(write_trace(60, 20)),
                      .environment = {"KVFERRY_MAX_JOBS=none"}});
  const auto exit = child.wait(ipc::Deadline::after(std::chrono::seconds(60)));
  const std::string complaints = child.stderr_text();
  EXPECT_EQ(exit, ChildExit::exited(1)) << complaints;
  EXPECT_THAT(complaints, HasSubstr("manager cannot run"));
  EXPECT_THAT(complaints, HasSubstr("max-jobs"));
  EXPECT_THAT(complaints, Not(HasSubstr("starting another one")));
  EXPECT_EQ(report()["restarts"], 0);
  EXPECT_EQ(report()["leftover_names"], 0) << report()["leftover_paths"];
}

TEST_F(ReplayTest, SamplesMemoryAndThePoolFromTheFirstRequestToTheLast) {
  constexpr int kRequests = 400;
  const Finished run = replay(write_trace(kRequests));
  ASSERT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  const json samples = report()["samples"];
  ASSERT_GE(samples.size(), 2U);
  EXPECT_LE(samples.size(), 64U);
  EXPECT_EQ(samples.front()["requests"], 0);
  EXPECT_EQ(samples.back()["requests"], kRequests);
  json before;
  for (const json& sample : samples) {
    for (const char* name : {"manager", "mover/0", "mover/1", "replay", "worker/0", "worker/1"}) {
      EXPECT_GT(sample["anonymous_kib"][name], 100) << sample;
      EXPECT_LT(sample["anonymous_kib"][name], 4 << 20) << sample;
    }
    EXPECT_EQ(sample["anonymous_kib"].size(), 6U) << sample;
    const json& pool = sample["pool"];
    ASSERT_TRUE(pool.is_object()) << sample;
    EXPECT_LE(pool["placed_extents"], pool["placed_blocks"]) << sample;
    EXPECT_LE(pool["free_in_slabs"], pool["free"]) << sample;
    if (before.is_object()) {
      EXPECT_GT(sample["requests"], before["requests"]);
      EXPECT_GE(sample["seconds"], before["seconds"]);
      EXPECT_GE(pool["placed_blocks"], before["pool"]["placed_blocks"]);
    }
    before = sample;
  }
  EXPECT_GE(before["pool"]["placed_blocks"], report()["stores"]);
  EXPECT_GT(before["pool"]["slabs"], 0);
}

TEST_F(ReplayTest, KeepsLogsWhereItIsTold) {
  const Finished run = replay(write_trace(60, 20), {"--keep-logs=" + path("logs")});
  EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  EXPECT_THAT(run.complaints, HasSubstr("logs of the processes: " + path("logs")));
  for (const char* name : {"manager.log", "worker-0.log", "mover-1.log"}) {
    EXPECT_GT(std::filesystem::file_size(path("logs") + "/" + name), 0U) << name;
  }
}

/// The last block of a turn is rarely full, and then the next turn does not share it: what a window
/// or a state is continued from stands before it.
TEST_F(ReplayTest, ANextTurnContinuesFromTheLastWholeBlockInEveryGroup) {
  for (const char* geometry : {"tiny-window", "tiny-state"}) {
    const Finished run =
        run_kvferry({"replay", "--device=host", "--requests=400", "--verify=full",
                     fmt::format("--geometry={}", geometry), "--runtime-dir=" + path("run"),
                     "--report=" + path("report.json")});
    ASSERT_EQ(run.exit, ChildExit::exited(0)) << geometry << run.output << run.complaints;
    expect_clean(report());
    EXPECT_GT(report()["hits_host"], 0) << geometry;
  }
}

class NoManagerTest : public ReplayTest, public testing::WithParamInterface<std::string> {};

TEST_P(NoManagerTest, ExitsWithThreeAndNamesTheInstance) {
  const Finished run =
      run_kvferry({GetParam(), "--runtime-dir=" + path("run"), "--instance=nobody"});
  EXPECT_EQ(run.exit, ChildExit::exited(3));
  EXPECT_THAT(run.complaints, HasSubstr("nobody"));
}

INSTANTIATE_TEST_SUITE_P(Commands,
                         NoManagerTest,
                         testing::Values("status", "clear", "reinit"),
                         [](const auto& command) { return command.param; });

}  // namespace
}  // namespace kvferry::test
