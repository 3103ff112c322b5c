// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// What a replay does with the host tier and when: write policies, prefetches, loads that are not
// worth it.
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <string>
#include <tuple>
#include <vector>

namespace kvferry::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

// Four turns of 6, 8, 10 and 12 blocks in 30 sessions that share their first block.
constexpr int kRequests = 120;
constexpr int kReferences = 30 * (6 + 8 + 10 + 12);
constexpr int kDistinct = 1 + 30 * 11;
constexpr int kUsedTwice = 1 + 30 * 9;  ///< All but what the last turn adds.

class ReplayTierTest : public ReplayTest {
 protected:
  /// Plays to the end, and nothing is wrong with it.
  json play(std::vector<std::string> more, int requests = kRequests) {
    more.emplace_back("--verify=full");
    const Finished run = replay(write_trace(requests), more);
    output_ = run.output;
    EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
    return checked(requests);
  }
  json checked(int requests) {
    json report = this->report();
    EXPECT_EQ(report["requests"], requests);
    EXPECT_EQ(report["blocks_corrupt"], 0);
    EXPECT_EQ(report["leaked_device_bytes"], 0);
    EXPECT_EQ(report["leaked_host_bytes"], 0);
    EXPECT_EQ(report["leftover_names"], 0) << report["leftover_paths"];
    return report;
  }
  static int hits(const json& report) {
    return report["hits_device"].get<int>() + report["hits_host"].get<int>();
  }
  static void expect_all_accounted(const json& prefetch) {
    EXPECT_EQ(prefetch["asked"].get<int>(), prefetch["arrived"].get<int>() +
                                                prefetch["failed"].get<int>() +
                                                prefetch["cancelled"].get<int>());
    EXPECT_LE(prefetch["used"], prefetch["arrived"]);
  }
  std::string output_;
};

TEST_F(ReplayTierTest, WriteThroughStoresEveryBlock) {
  const json report = play({"--in-flight=1"});
  EXPECT_EQ(report["write_policy"], "write-through");
  EXPECT_EQ(report["stores"], kDistinct);
  EXPECT_EQ(hits(report), kReferences - kDistinct);
  EXPECT_EQ(report["written_back"], 0);
}

TEST_F(ReplayTierTest, SelectiveStoresWhatIsUsedTwiceAndNothingElse) {
  const json report = play({"--in-flight=1", "--write-policy=selective"});
  EXPECT_EQ(report["write_policy"], "selective");
  EXPECT_EQ(report["stores"], kUsedTwice);
  EXPECT_GT(report["hits_host"], 0);
  EXPECT_LT(hits(report), kReferences - kDistinct);
}

TEST_F(ReplayTierTest, SelectiveWithMoreUsesStoresLess) {
  const json report = play({"--in-flight=1", "--write-policy=selective", "--write-uses=3"});
  EXPECT_EQ(report["stores"], 1 + 30 * 7);
}

TEST_F(ReplayTierTest, WriteBackStoresOnlyWhatIsEvictedAndLosesNothing) {
  const json report = play({"--in-flight=1", "--write-policy=write-back", "--write-back-wait=60s"});
  EXPECT_EQ(report["write_policy"], "write-back");
  EXPECT_EQ(report["evicted_unstored"], 0);
  EXPECT_EQ(hits(report), kReferences - kDistinct);
  EXPECT_EQ(report["stores"], report["written_back"]);
  EXPECT_GT(report["stores"], 0);
  EXPECT_LT(report["stores"], kDistinct);  // What the device still holds was never written.
  EXPECT_THAT(output_, HasSubstr("blocks written back"));
}

TEST_F(ReplayTierTest, WriteBackWithManyRequestsAtATimeReusesNothingThatIsBeingRead) {
  const json report = play({"--in-flight=8", "--write-policy=write-back", "--gpu-blocks=60"}, 300);
  EXPECT_GT(report["written_back"], 0);
  EXPECT_GT(report["hits_host"], 0);
}

TEST_F(ReplayTierTest, AClearUnderWriteBackLosesWhatTheDeviceHeldAloneAndNothingElse) {
  const json report = play(
      {"--in-flight=1", "--write-policy=write-back", "--write-back-wait=60s", "--clear-every=40"});
  EXPECT_EQ(report["clears"], kRequests / 40);
  EXPECT_GT(report["hits_host"], 0);
  EXPECT_LE(hits(report), kReferences - kDistinct);
}

TEST_F(ReplayTierTest, BeyondTheStoreQueueBlocksAreNotStoredAndRequestsAreServed) {
  // Each request has more new blocks than that. Whether anything is found again is open.
  const Finished run = replay(write_trace(kRequests), {"--store-queue=4", "--verify=full"});
  const json report = checked(kRequests);
  EXPECT_GT(report["stores_dropped_queue"], 0);
  EXPECT_GT(report["stores"], 0);
  EXPECT_THAT(run.output, HasSubstr("stores dropped, queue"));
}

TEST_F(ReplayTierTest, OptionsInTheEnvironmentAreTheReplaysAndStopNoWorker) {
  ChildProcess child({.program = KVFERRY_PROGRAM,
                      .arguments = replay_arguments(write_trace(kRequests), {"--in-flight=1"}),
                      .environment = {"KVFERRY_WRITE_POLICY=selective", "KVFERRY_PREFILL_RATE=9"}});
  child.close_stdin();
  const ipc::Deadline deadline = ipc::Deadline::after(std::chrono::seconds(90));
  while (child.read_line(deadline)) continue;
  EXPECT_EQ(child.wait(deadline), ChildExit::exited(0)) << child.stderr_text();
  EXPECT_EQ(checked(kRequests)["stores"], kUsedTwice);
  EXPECT_THAT(child.stderr_text(), HasSubstr("--prefill-rate is for --recompute auto, not never"));
}

TEST_F(ReplayTierTest, AnUnknownPolicyIsRefusedWithAllNames) {
  const Finished run = replay(write_trace(10), {"--write-policy=around"});
  EXPECT_EQ(run.exit, ChildExit::exited(2));
  EXPECT_THAT(run.complaints, HasSubstr("write-through|selective|write-back"));
}

class ReplayPrefetchTest : public ReplayTierTest,
                           public testing::WithParamInterface<std::string> {};

TEST_P(ReplayPrefetchTest, LoadsPrefixesOfQueuedRequestsAndTheyAreWhatWasStored) {
  const json report = play({"--in-flight=2", "--prefetch=" + GetParam()}, 300);
  EXPECT_EQ(report["prefetch_stop"], GetParam());
  const json& prefetch = report["prefetch"];
  EXPECT_GT(prefetch["requests"], 0);
  EXPECT_GT(prefetch["arrived"], 0);
  EXPECT_GT(prefetch["used"], 0);
  expect_all_accounted(prefetch);
  EXPECT_GE(report["hits_host"], prefetch["used"]);
  EXPECT_THAT(output_, HasSubstr("prefetched blocks"));
}

TEST_P(ReplayPrefetchTest, SurvivesClearsAndAWindowedGroup) {
  const json report = play({"--in-flight=2", "--prefetch=" + GetParam(), "--clear-every=60",
                            "--geometry=tiny-window", "--gpu-blocks=150"},
                           240);
  EXPECT_EQ(report["clears"], 240 / 60);
  EXPECT_GT(report["prefetch"]["requests"], 0);
  expect_all_accounted(report["prefetch"]);
}

INSTANTIATE_TEST_SUITE_P(Stops,
                         ReplayPrefetchTest,
                         testing::Values("best-effort", "wait", "timeout"),
                         [](const auto& stop) {
                           std::string name = stop.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_F(ReplayTierTest, RequestsThatWaitForAllHaveThatInTheirHits) {
  const json report = play({"--in-flight=1", "--prefetch=wait", "--prefetch-timeout=60s"});
  EXPECT_EQ(hits(report), kReferences - kDistinct);
  EXPECT_EQ(report["prefetch"]["cancelled"], 0);
}

TEST_F(ReplayTierTest, WithoutRoomOnTheDeviceBlocksAreKeptInHostMemory) {
  const json report = play({"--in-flight=2", "--gpu-blocks=40", "--prefetch=best-effort"}, 240);
  EXPECT_GT(report["prefetch"]["leases"], 0);
}

// A small pool that is always full, and the stores of every request: what a request is found to
// have is wanted by others' stores before it is loaded, of a prefetch that waits for its turn for
// long.
TEST_F(ReplayTierTest, WhatWasFoundInAFullPoolIsThereWhenItIsLoaded) {
  constexpr int kMadeUp = 3000;
  for (const char* const prefetch : {"off", "wait", "best-effort"}) {
    std::vector<std::string> arguments = {"replay",
                                          "--device=host",
                                          "--runtime-dir=" + path("run"),
                                          "--verify=full",
                                          "--requests=" + std::to_string(kMadeUp),
                                          "--host-memory=48MiB",
                                          "--gpu-blocks=600",
                                          "--in-flight=4",
                                          "--eviction-policy=lru",
                                          "--report=" + path("report.json"),
                                          std::string("--prefetch=") + prefetch};
    if (prefetch != std::string("off")) arguments.emplace_back("--prefetch-requests=64");
    const Finished run = run_kvferry(arguments);
    EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
    const json report = checked(kMadeUp);
    EXPECT_GT(report["loads"], 500) << prefetch;
    EXPECT_EQ(report["failed_jobs"], 0) << prefetch;
    EXPECT_EQ(report["recomputed"], 0) << prefetch;
    EXPECT_EQ(report["prefetch"]["failed"], 0) << prefetch;
  }
}

TEST_F(ReplayTierTest, AMoverThatDiesUnderPrefetchesIsReplacedAndNoBlockIsWrong) {
  // All requests have arrived: there is a queue, and prefetches for it, at any time.
  constexpr int kLong = 1500;
  start_replay(write_trace(kLong, 30),
               {"--in-flight=2", "--prefetch=wait", "--prefetch-timeout=2s"});
  auto before = children();
  ASSERT_TRUE(before.at("mover/0").signal(SIGKILL));
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  const json report = checked(kLong);
  EXPECT_EQ(report["restarts"], 1);
  EXPECT_GT(report["prefetch"]["requests"], 0);
  expect_all_accounted(report["prefetch"]);
}

TEST_F(ReplayTierTest, AManagerThatDiesUnderWriteBackIsReplacedAndLeavesNoBlockInUse) {
  // All blocks of the device are taken: what the dead one was asked to store makes room all the
  // same, or the rest would wait for it.
  constexpr int kLong = 1500;
  start_replay(write_trace(kLong, 30), {"--in-flight=8", "--write-policy=write-back",
                                        "--write-back-wait=60s", "--gpu-blocks=60"});
  auto before = children();
  ASSERT_TRUE(before.at("manager").signal(SIGKILL));
  EXPECT_EQ(finish_replay(std::chrono::seconds(50)), ChildExit::exited(0))
      << running_->stderr_text();
  const json report = checked(kLong);
  EXPECT_EQ(report["restarts"], 1);
  EXPECT_GT(report["written_back"], 0);
  EXPECT_GT(report["failed_jobs"], 0) << "nothing was under way";
}

TEST_F(ReplayTierTest, RecomputeAlwaysLoadsNothing) {
  const json report = play({"--recompute=always"});
  EXPECT_EQ(report["loads"], 0);
  EXPECT_EQ(report["hits_host"], 0);
  EXPECT_GT(report["load_choice"]["refused"], 0);
  EXPECT_GT(report["load_choice"]["blocks_computed"], 0);
  EXPECT_EQ(report["bytes_to_device"], 0);
}

TEST_F(ReplayTierTest, AutoComputesWhereThatIsFasterAndLoadsWhereItIsNot) {
  const json fast = play({"--recompute=auto", "--prefill-rate=1e12"});
  EXPECT_GT(fast["load_choice"]["refused"], 0);
  const json slow = play({"--recompute=auto", "--prefill-rate=1"});
  EXPECT_EQ(slow["load_choice"]["refused"], 0);
  EXPECT_EQ(slow["load_choice"]["shortened"], 0);
  EXPECT_GT(slow["load_choice"]["load_bytes_per_s"], 0);
  EXPECT_LT(fast["loads"], slow["loads"]);
}

TEST_F(ReplayTierTest, AutoMeasuresHowFastTheEngineComputes) {
  const json report = play({"--recompute=auto", "--geometry=tiny-window", "--gpu-blocks=150"});
  EXPECT_GT(report["load_choice"]["compute_tokens_per_s"], 0);
  EXPECT_GT(report["load_choice"]["requests"], 0);
}

}  // namespace
}  // namespace kvferry::test
