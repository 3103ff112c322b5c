// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Pause, continue and flush from the command line, on an engine that serves.
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>

#include <csignal>
#include <string>
#include <vector>

namespace kvferry::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

/// Long enough that traffic goes on behind whatever happens in its middle.
constexpr int kRequests = 400;
constexpr int kGapMs = 10;

class ReplayPauseTest : public ReplayTest {
 protected:
  void start(int gap_ms = kGapMs) {
    start_replay(write_trace(kRequests, 30, gap_ms), {"--speed=1", "--verify=full"});
  }
  [[nodiscard]] Finished command(const std::string& name,
                                 std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments{name};
    for (const std::string& option : instance_options()) arguments.push_back(option);
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_kvferry(arguments);
  }
  void expect_done(const std::string& name,
                   const std::string& says,
                   std::vector<std::string> more = {}) const {
    const Finished done = command(name, std::move(more));
    EXPECT_EQ(done.exit, ChildExit::exited(0)) << done.complaints;
    EXPECT_THAT(done.output, HasSubstr(says));
  }
  [[nodiscard]] json engine() const {
    const json now = status();
    return now.is_null() ? json::object() : now["engines"][0];
  }
  /// The replay goes on to its end, and nothing is wrong with what it served.
  json finish() {
    EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
    json report = this->report();
    EXPECT_EQ(report["requests"].get<int>() + report["aborted"].get<int>(), kRequests);
    EXPECT_EQ(report["blocks_corrupt"], 0);
    EXPECT_EQ(report["leaked_device_bytes"], 0);
    EXPECT_EQ(report["leaked_host_bytes"], 0);
    EXPECT_EQ(report["leftover_names"], 0) << report["leftover_paths"];
    return report;
  }
};

class ReplayPauseModeTest : public ReplayPauseTest,
                            public testing::WithParamInterface<const char*> {};

TEST_P(ReplayPauseModeTest, StopsWorkUntilContinue) {
  const std::string mode = GetParam();
  start();
  expect_done("pause", "paused (" + mode + ") in", {"--mode=" + mode});
  EXPECT_EQ(engine()["paused"], mode);
  expect_done("pause", "0 running", {"--mode=" + mode});
  // Nothing is asked of the cache while it is paused: transfers drain, and none are added.
  ASSERT_TRUE(wait_until([&] {
    const json jobs = engine()["jobs"];
    return jobs["queued"] == 0 && jobs["running"] == 0;
  }));
  const json drained = engine()["jobs"];
  expect_done("status", mode);
  EXPECT_EQ(engine()["jobs"], drained);
  expect_done("continue", "running again after");
  EXPECT_EQ(engine()["paused"], nullptr);
  const Finished again = command("continue");
  EXPECT_EQ(again.exit, ChildExit::exited(1));
  EXPECT_THAT(again.complaints, HasSubstr("not_paused"));
  const json report = finish();
  EXPECT_GE(report["pauses"], 2);
  if (mode != "abort") {
    EXPECT_EQ(report["aborted"], 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Modes,
                         ReplayPauseModeTest,
                         testing::Values("abort", "retract", "in_place"),
                         [](const auto& mode) { return std::string(mode.param); });

TEST_F(ReplayPauseTest, RetractThenFlushWorksAndNothingStaleIsServed) {
  start();
  expect_done("pause", "paused (retract)");
  expect_done("flush", "flushed in");
  EXPECT_EQ(status()["index"]["blocks"], 0);
  expect_done("flush", "flushed in", {"--host=keep", "--no-empty-cache"});
  EXPECT_EQ(engine()["paused"], "retract");
  expect_done("continue", "running again", {"--no-empty-cache"});
  const json report = finish();
  EXPECT_EQ(report["flushes"], 2);
  EXPECT_GT(report["blocks_verified"], 0);
}

TEST_F(ReplayPauseTest, FlushUnderTrafficWaitsForAnIdleMoment) {
  start(6 * kGapMs);  // With idle moments on a busy machine, too.
  expect_done("flush", "flushed in", {"--timeout=30"});
  EXPECT_EQ(engine()["flushes"], 1);
  EXPECT_EQ(engine()["paused"], nullptr);
  EXPECT_EQ(finish()["flushes"], 1);
}

TEST_F(ReplayPauseTest, APausedEngineCanBeClearedAndComesBackPaused) {
  start();
  expect_done("pause", "paused (in_place)", {"--mode=in_place"});
  expect_done("clear", "cleared in");
  expect_done("reinit", "ready again");
  EXPECT_EQ(engine()["paused"], "in_place");
  expect_done("continue", "running again");
  finish();
}

TEST_F(ReplayPauseTest, APauseOutlivesAKilledManager) {
  start();
  expect_done("pause", "paused (retract)", {"--mode=retract"});
  const auto before = children();
  const ipc::ProcessRef& manager = before.at("manager");
  ASSERT_TRUE(manager.signal(SIGKILL));
  ASSERT_TRUE(wait_until([&] {
    const json now = status();
    return now.is_object() && now["pid"] != manager.pid() && now["engines"].size() == 1 &&
           now["engines"][0]["paused"] == "retract" && now["engines"][0]["offload_ready"] == true;
  })) << running_->stderr_text();
  expect_done("continue", "running again");
  finish();
}

}  // namespace
}  // namespace kvferry::test
