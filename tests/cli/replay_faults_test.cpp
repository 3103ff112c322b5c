// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/replay_fixture.hpp"
#include "kvferry/ipc/base/unique_fd.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <tuple>
#include <vector>

namespace kvferry::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono_literals::operator""s;
using testing::HasSubstr;

/// Long enough that traffic goes on behind whatever happens in its middle.
constexpr int kRequests = 400;
constexpr int kGapMs = 10;

class ReplayFaultTest : public ReplayTest {
 protected:
  std::string slow_trace() { return write_trace(kRequests, 30, kGapMs); }
};

/// Victim, owner.
using Death = std::tuple<std::string, std::string>;

class ReplayDeathTest : public ReplayFaultTest, public testing::WithParamInterface<Death> {};

TEST_P(ReplayDeathTest, IsNamedReplacedAndSurvived) {
  const auto& [victim, owner] = GetParam();
  start_replay(slow_trace(), {"--speed=1", "--cache-owner=" + owner});
  auto before = children();
  ASSERT_EQ(before.size(), 5U);
  const auto& process = before.at(victim);
  ASSERT_TRUE(process.signal(SIGKILL));
  EXPECT_TRUE(wait_until([&] {
    const auto now = children();
    const auto found = now.find(victim);
    return found != now.end() && found->second.pid() != process.pid();
  })) << running_->stderr_text();
  EXPECT_THAT(running_->stderr_text(), HasSubstr(victim + " (pid " + std::to_string(process.pid()) +
                                                 ") died: killed by signal 9"));
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  const json report = this->report();
  EXPECT_EQ(report["requests"], kRequests);
  EXPECT_EQ(report["restarts"], 1);
  EXPECT_EQ(report["blocks_corrupt"], 0);
  EXPECT_EQ(report["leaked_device_bytes"], 0);
  EXPECT_EQ(report["leaked_host_bytes"], 0);
  EXPECT_EQ(report["leftover_names"], 0) << report["leftover_paths"];
  EXPECT_GT(report["hits_host"], 0);
}

INSTANTIATE_TEST_SUITE_P(Victims,
                         ReplayDeathTest,
                         testing::Combine(testing::Values("manager", "mover/0", "worker/1"),
                                          testing::Values("worker", "mover")),
                         [](const auto& death) {
                           const std::string victim = std::get<0>(death.param);
                           return victim.substr(0, victim.find('/')) + "_owner_" +
                                  std::get<1>(death.param);
                         });

/// What a rank's contents are known by.
json contents_of(const json& status, std::size_t rank) {
  const json& worker = status["engines"][0]["ranks"][rank]["worker"];
  return {worker["session"], worker["epoch"], worker["prepared_by"]};
}

class ReplayWorkerDeathTest : public ReplayFaultTest {
 protected:
  /// Kills workers in the middle of the traffic and waits until the engine is ready again.
  void replace_workers(const std::vector<std::size_t>& ranks) {
    const auto before = children();
    for (const std::size_t rank : ranks) {
      const std::string name = "worker/" + std::to_string(rank);
      ASSERT_TRUE(before.contains(name));
      ASSERT_TRUE(before.at(name).signal(SIGKILL));
    }
    ASSERT_TRUE(wait_until([&] {
      const json status = this->status();
      if (!status.is_object() || status["engines"][0]["phase"] != "ready") return false;
      return std::all_of(ranks.begin(), ranks.end(), [&](std::size_t rank) {
        const json& worker = status["engines"][0]["ranks"][rank]["worker"];
        return worker["mapped"] == true &&
               worker["pid"] != before.at("worker/" + std::to_string(rank)).pid();
      });
    })) << running_->stderr_text();
  }
};

TEST_F(ReplayWorkerDeathTest, BlocksInAMoversArenaOutliveTheirWorkers) {
  start_replay(slow_trace(), {"--speed=1", "--cache-owner=mover"});
  const json before = status();
  ASSERT_EQ(before["engines"][0]["phase"], "ready");
  ASSERT_NO_FATAL_FAILURE(replace_workers({0, 1}));
  const json after = status();
  EXPECT_EQ(after["engines"][0]["generation"], before["engines"][0]["generation"]);
  for (const std::size_t rank : {0U, 1U}) {
    EXPECT_EQ(contents_of(after, rank), contents_of(before, rank));
    EXPECT_GT(after["engines"][0]["ranks"][rank]["worker"]["prepared_by"], 0);
  }
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  const json report = this->report();
  EXPECT_EQ(report["requests"], kRequests);
  EXPECT_EQ(report["restarts"], 2);
  EXPECT_EQ(report["blocks_corrupt"], 0);
  // Every one of them was verified byte for byte.
  EXPECT_GT(report["blocks_survived"], 0);
  EXPECT_GE(report["blocks_verified"], report["blocks_survived"]);
  EXPECT_EQ(report["leaked_device_bytes"], 0);
}

TEST_F(ReplayWorkerDeathTest, BlocksInAWorkersArenaEndWithIt) {
  start_replay(slow_trace(), {"--speed=1", "--cache-owner=worker"});
  const json before = status();
  ASSERT_NO_FATAL_FAILURE(replace_workers({1}));
  const json after = status();
  EXPECT_GT(after["engines"][0]["generation"], before["engines"][0]["generation"]);
  EXPECT_NE(contents_of(after, 1), contents_of(before, 1));
  EXPECT_EQ(contents_of(after, 0), contents_of(before, 0));
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  EXPECT_EQ(report()["blocks_survived"], 0);
  EXPECT_EQ(report()["blocks_corrupt"], 0);
}

class ReplaySignalTest : public ReplayFaultTest, public testing::WithParamInterface<int> {};

TEST_P(ReplaySignalTest, EndsAllWithinFiveSecondsAndLeavesNothing) {
  start_replay(slow_trace(), {"--speed=1", "--clear-every=20"});
  const auto before = children();
  ASSERT_EQ(before.size(), 5U);
  running_->signal(GetParam());
  EXPECT_EQ(finish_replay(5s), ChildExit::exited(1)) << running_->stderr_text();
  EXPECT_THAT(running_->stderr_text(), HasSubstr("interrupted by signal"));
  for (const auto& [name, process] : before) {
    EXPECT_TRUE(process.has_died()) << name;
  }
  EXPECT_TRUE(fs::is_empty(folder_ / "run"));
  const json report = this->report();
  EXPECT_EQ(report["leaked_device_bytes"], 0);
  EXPECT_EQ(report["leaked_host_bytes"], 0);
  EXPECT_EQ(report["leftover_names"], 0) << report["leftover_paths"];
  EXPECT_LT(report["requests"], kRequests);
}

INSTANTIATE_TEST_SUITE_P(Signals,
                         ReplaySignalTest,
                         testing::Values(SIGTERM, SIGINT),
                         [](const auto& signal) {
                           return std::string(signal.param == SIGTERM ? "Term" : "Int");
                         });

TEST_F(ReplayFaultTest, ItsProcessesEndByThemselvesWhenItIsKilled) {
  start_replay(slow_trace(), {"--speed=1"});
  const auto before = children();
  ASSERT_EQ(before.size(), 5U);
  running_->kill();
  const ipc::Deadline deadline = ipc::Deadline::after(10s);
  for (const auto& [name, process] : before) {
    EXPECT_TRUE(process.wait_death(deadline)) << name;
  }
}

TEST_F(ReplayFaultTest, AProcessThatKeepsDyingEndsTheRunWithItsLog) {
  const std::string trace = slow_trace();
  start_replay(trace, {"--speed=1"});
  for (int i = 0; i < 5 && wait_until([this] { return children().contains("mover/0"); }); ++i) {
    const auto now = children();
    const auto mover = now.find("mover/0");
    if (mover == now.end()) continue;
    (void)mover->second.signal(SIGKILL);
    ASSERT_TRUE(mover->second.wait_death(soon()));
  }
  EXPECT_EQ(finish_replay(15s), ChildExit::exited(1));
  EXPECT_THAT(running_->stderr_text(), HasSubstr("mover/0 died 5 times within 10 s"));
}

TEST_F(ReplayFaultTest, AnOutsidersClearAndReinitAreSurvived) {
  start_replay(slow_trace(), {"--speed=1"});
  std::vector<std::string> clear = instance_options();
  clear.insert(clear.begin(), {"clear", "--host=keep"});
  const Finished cleared = run_kvferry(clear);
  ASSERT_EQ(cleared.exit, ChildExit::exited(0)) << cleared.output << cleared.complaints;
  EXPECT_THAT(cleared.output, HasSubstr("cleared"));
  EXPECT_EQ(status()["engines"][0]["phase"], "cleared");
  std::vector<std::string> text = instance_options();
  text.insert(text.begin(), "status");
  EXPECT_THAT(run_kvferry(text).output, HasSubstr("engine replay: cleared"));
  std::vector<std::string> reinit = instance_options();
  reinit.insert(reinit.begin(), {"reinit", "--gpu-blocks=200"});
  const Finished back = run_kvferry(reinit);
  ASSERT_EQ(back.exit, ChildExit::exited(0)) << back.output << back.complaints;
  EXPECT_EQ(status()["engines"][0]["group_blocks"], json::array({200}));
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  const json report = this->report();
  EXPECT_EQ(report["requests"], kRequests);
  EXPECT_EQ(report["blocks_corrupt"], 0);
  EXPECT_GT(report["hits_host"], 0);
}

/// Overwrites every byte of the pool that the manager has open.
void scribble_over_pool(pid_t manager) {
  const fs::path fds = fs::path("/proc") / std::to_string(manager) / "fd";
  fs::path pool;
  off_t largest = 0;
  for (const auto& entry : fs::directory_iterator(fds)) {
    std::error_code error;
    if (!fs::read_symlink(entry.path(), error).native().starts_with("/memfd:")) continue;
    struct stat info {};
    if (stat(entry.path().c_str(), &info) == 0 && info.st_size > largest) {
      largest = info.st_size;
      pool = entry.path();
    }
  }
  ASSERT_GT(largest, 0);
  const ipc::UniqueFd fd(open(pool.c_str(), O_WRONLY | O_CLOEXEC));
  ASSERT_TRUE(fd.valid());
  const std::vector<char> garbage(1U << 20, '\x5a');
  for (off_t at = 0; at < largest; at += static_cast<off_t>(garbage.size())) {
    const auto bytes =
        std::min<std::size_t>(garbage.size(), static_cast<std::size_t>(largest - at));
    ASSERT_EQ(pwrite(fd.get(), garbage.data(), bytes, at), static_cast<ssize_t>(bytes));
  }
}

TEST_F(ReplayFaultTest, CorruptHostMemoryIsFoundNamedAndFailsTheRun) {
  start_replay(slow_trace(), {"--speed=1", "--host-memory=64MiB"});
  const auto now = children();
  ASSERT_TRUE(now.contains("manager"));
  ASSERT_NO_FATAL_FAILURE(scribble_over_pool(now.at("manager").pid()));
  EXPECT_EQ(finish_replay(), ChildExit::exited(1)) << running_->stderr_text();
  EXPECT_THAT(running_->stderr_text(), HasSubstr("CORRUPT: request"));
  EXPECT_THAT(running_->stderr_text(), HasSubstr("loaded from the host"));
  EXPECT_GT(report()["blocks_corrupt"], 0);
  EXPECT_EQ(report()["requests"], kRequests);
}

}  // namespace
}  // namespace kvferry::test
