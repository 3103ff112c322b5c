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
#include <fstream>
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
  /// For what takes its seconds, and more of them on a busy machine.
  std::string slower_trace() { return write_trace(kRequests, 30, 6 * kGapMs); }
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
  ASSERT_EQ(report["deaths"].size(), 1U);
  const json& death = report["deaths"][0];
  EXPECT_EQ(death["process"], victim);
  EXPECT_EQ(death["before"]["requests"].get<int>() + death["after"]["requests"].get<int>(),
            kRequests);
  EXPECT_EQ(death["before"]["requests"], death["requests"]);
  EXPECT_GT(death["after"]["hits_device"].get<int>() + death["after"]["hits_host"].get<int>(), 0);
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

TEST_F(ReplayFaultTest, WhatAKilledManagerHadInHostMemoryIsFoundAgain) {
  start_replay(slow_trace(), {"--speed=1", "--verify=full"});
  ASSERT_TRUE(wait_until([&] {
    const json status = this->status();
    return status.is_object() && status["pool"]["integrity"]["summed"] > 50;
  })) << running_->stderr_text();
  const json before = status();
  ASSERT_TRUE(before["pool"]["kept"].is_null());
  ASSERT_TRUE(children().at("manager").signal(SIGKILL));
  json after;
  ASSERT_TRUE(wait_until([&] {
    after = status();
    return after.is_object() && after["pool"]["kept"].is_object() &&
           after["pool"]["kept"]["adopted"] > 0 && after["pool"]["kept"]["doubtful"] == 0 &&
           after["engines"][0]["offload_ready"] == true;
  })) << running_->stderr_text();
  EXPECT_EQ(after["pool"]["id"], before["pool"]["id"]);
  EXPECT_GE(after["pool"]["kept"]["adopted"], 50);
  // Each of them is checked when it is loaded for the first time.
  ASSERT_TRUE(wait_until([&] {
    const json now = status();
    return now.is_object() && now["pool"]["integrity"]["checked"] > 0;
  })) << running_->stderr_text();
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  EXPECT_EQ(report()["blocks_corrupt"], 0);
  EXPECT_EQ(report()["leaked_host_bytes"], 0);
}

// Its movers have a backlog of checksums then, and on a busy machine little time for it: the
// traffic goes on for long enough.
TEST_F(ReplayFaultTest, OfAManagerThatIsKilledUnderFullLoadNearlyEverythingIsFoundAgain) {
  start_replay(write_trace(10 * kRequests));
  ASSERT_TRUE(wait_until([&] {
    const json status = this->status();
    return status.is_object() && status["index"]["blocks"] > 100;
  })) << running_->stderr_text();
  ASSERT_TRUE(children().at("manager").signal(SIGKILL));
  json kept;
  ASSERT_TRUE(wait_until([&] {
    const json status = this->status();
    if (!status.is_object() || !status["pool"]["kept"].is_object()) return false;
    kept = status["pool"]["kept"];
    return kept["adopted"].get<int>() + kept["dropped"].get<int>() == kept["found"].get<int>();
  })) << running_->stderr_text();
  EXPECT_GT(kept["found"], 50);
  EXPECT_LE(kept["unsummed"].get<int>(), kept["found"].get<int>() / 10) << kept;
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  EXPECT_EQ(report()["blocks_corrupt"], 0);
}

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
      const json status = after_ = this->status();
      if (!status.is_object() || status["engines"][0]["phase"] != "ready") return false;
      return std::all_of(ranks.begin(), ranks.end(), [&](std::size_t rank) {
        const json& worker = status["engines"][0]["ranks"][rank]["worker"];
        return worker["mapped"] == true &&
               worker["pid"] != before.at("worker/" + std::to_string(rank)).pid();
      });
    })) << running_->stderr_text();
  }

  json after_;  ///< The status that told so.
};

TEST_F(ReplayWorkerDeathTest, BlocksInAMoversArenaOutliveTheirWorkers) {
  start_replay(slow_trace(), {"--speed=1", "--cache-owner=mover"});
  const json before = status();
  ASSERT_EQ(before["engines"][0]["phase"], "ready");
  ASSERT_NO_FATAL_FAILURE(replace_workers({0, 1}));
  const json& after = after_;
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
  const json& after = after_;
  EXPECT_GT(after["engines"][0]["generation"], before["engines"][0]["generation"]);
  EXPECT_NE(contents_of(after, 1), contents_of(before, 1));
  EXPECT_EQ(contents_of(after, 0), contents_of(before, 0));
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  EXPECT_EQ(report()["blocks_survived"], 0);
  EXPECT_EQ(report()["blocks_corrupt"], 0);
}

class ReplaySignalTest : public ReplayFaultTest, public testing::WithParamInterface<int> {};

// What a machine under load may add to a time in which all has ended.
constexpr std::chrono::seconds kSlack{15};

TEST_P(ReplaySignalTest, EndsAllWithinFiveSecondsAndLeavesNothing) {
  start_replay(slow_trace(), {"--speed=1", "--clear-every=20"});
  const auto before = children();
  ASSERT_EQ(before.size(), 5U);
  running_->signal(GetParam());
  EXPECT_EQ(finish_replay(5s + kSlack), ChildExit::exited(1)) << running_->stderr_text();
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

INSTANTIATE_TEST_SUITE_P(
    Signals, ReplaySignalTest, testing::Values(SIGTERM, SIGINT, SIGHUP), [](const auto& signal) {
      return std::string(signal.param == SIGTERM ? "Term" : signal.param == SIGINT ? "Int" : "Hup");
    });

TEST_F(ReplayFaultTest, AProcessThatHangsAtTheEndIsKilledAndItsNamesRemoved) {
  start_replay(slower_trace(), {"--speed=1"});
  const auto before = children();
  ASSERT_TRUE(before.at("manager").signal(SIGSTOP));
  running_->signal(SIGTERM);
  EXPECT_EQ(finish_replay(), ChildExit::exited(1)) << running_->stderr_text();
  EXPECT_THAT(running_->stderr_text(), HasSubstr("manager (pid"));
  EXPECT_THAT(running_->stderr_text(), HasSubstr("did not end in time and is killed"));
  EXPECT_THAT(running_->stderr_text(), testing::Not(HasSubstr("left behind")));
  EXPECT_TRUE(before.at("manager").has_died());
  EXPECT_EQ(report()["leftover_names"], 0) << report()["leftover_paths"];
  EXPECT_TRUE(fs::is_empty(folder_ / "run"));
}

TEST_F(ReplayFaultTest, ItsProcessesEndByThemselvesWhenItIsKilled) {
  start_replay(slow_trace(), {"--speed=1"});
  const auto before = children();
  ASSERT_EQ(before.size(), 5U);
  running_->kill();
  const ipc::Deadline deadline = soon();
  for (const auto& [name, process] : before) {
    EXPECT_TRUE(process.wait_death(deadline)) << name;
  }
}

TEST_F(ReplayFaultTest, AProcessThatKeepsDyingEndsTheRunWithItsLog) {
  start_replay(slower_trace(), {"--speed=1"});
  // Five times within 10 s, however long a busy machine took for the first of them.
  while (wait_until([this] { return children().contains("mover/0"); })) {
    const auto now = children();
    const auto mover = now.find("mover/0");
    if (mover == now.end()) continue;
    (void)mover->second.signal(SIGKILL);
    ASSERT_TRUE(mover->second.wait_death(soon()));
  }
  EXPECT_EQ(finish_replay(), ChildExit::exited(1));
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
  const Finished again = run_kvferry(clear);
  EXPECT_EQ(again.exit, ChildExit::exited(0)) << again.output << again.complaints;
  EXPECT_THAT(again.output, HasSubstr("\nalready cleared; 0 blocks dropped"));
  EXPECT_EQ(status()["engines"][0]["clears"], 1);
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

TEST_F(ReplayFaultTest, AClearThatFailsOnOneRankTellsOfAllAndExitsWithOne) {
  start_replay(slower_trace(), {"--speed=1"});
  const auto now = children();
  ASSERT_TRUE(now.at("worker/1").signal(SIGSTOP));
  std::vector<std::string> clear = instance_options();
  clear.insert(clear.begin(), {"clear", "--host=keep", "--deadline=3s"});
  const Finished cleared = run_kvferry(clear);
  ASSERT_TRUE(now.at("worker/1").signal(SIGCONT));
  EXPECT_EQ(cleared.exit, ChildExit::exited(1)) << cleared.output << cleared.complaints;
  EXPECT_THAT(cleared.output, testing::ContainsRegex("replay +0  cleared "));
  EXPECT_THAT(cleared.output, testing::ContainsRegex("replay +1  failed"));
  EXPECT_THAT(cleared.complaints, HasSubstr("kvferry clear: replay/1: "));
  running_->signal(SIGTERM);
  EXPECT_EQ(finish_replay(), ChildExit::exited(1));
}

/// A mover with the options of the replay's own for rank 0, in the given runtime directory.
ChildProcess start_second_mover(const ipc::ProcessRef& mover, const std::string& runtime_dir) {
  std::ifstream in(fs::path("/proc") / std::to_string(mover.pid()) / "cmdline");
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(in, argument, '\0');) {
    if (argument.starts_with("--runtime-dir=") && !runtime_dir.empty()) {
      argument = "--runtime-dir=" + runtime_dir;
    }
    if (!argument.starts_with("--parent-fd")) arguments.push_back(argument);
  }
  arguments.erase(arguments.begin());
  return ChildProcess({.program = KVFERRY_PROGRAM, .arguments = arguments});
}

TEST_F(ReplayFaultTest, ASecondMoverOfARankEndsWithTheReasonAndDoesNoHarm) {
  start_replay(slower_trace(), {"--speed=1"});
  ChildProcess second = start_second_mover(children().at("mover/0"), {});
  const auto has_ended = [&second] {
    return second.wait(ipc::Deadline::at(ipc::TimePoint{})).has_value();
  };
  EXPECT_TRUE(wait_until([&] {
    const json refusal = status()["engines"][0]["last_refusal"];
    return has_ended() || (refusal.is_string() && refusal != "");
  }));
  // However long it stays (a busy machine may not have stopped it in time), offload goes on.
  second.signal(SIGSTOP);
  EXPECT_TRUE(wait_until([&] {
    const json engine = status()["engines"][0];
    return has_ended() ||
           (engine["offload_ready"] == true && engine["ranks"][0]["worker"]["living_leases"] == 2);
  }));
  second.signal(SIGCONT);
  EXPECT_EQ(second.wait(soon()), ChildExit::exited(1)) << second.stderr_text();
  EXPECT_THAT(second.stderr_text(), HasSubstr("already_exists"));
  EXPECT_THAT(second.stderr_text(), HasSubstr("has a living mover"));
  const json engine = status()["engines"][0];
  EXPECT_THAT(engine["last_refusal"].get<std::string>(),
              HasSubstr("(pid " + std::to_string(second.pid()) + ")"));
  EXPECT_TRUE(wait_until([&] { return status()["engines"][0]["offload_ready"] == true; }));
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  EXPECT_EQ(report()["restarts"], 0);
  EXPECT_EQ(report()["blocks_corrupt"], 0);
}

/// Somebody whom the manager does not know maps the arena: it may copy on behalf of an earlier
/// manager, so offload has to wait for its end.
class UnknownHolderTest : public ReplayFaultTest {
 protected:
  ChildProcess start_holder() {
    // The lease's sockets are there, the manager's are not.
    const fs::path instance = folder_ / "holder" / "replay";
    fs::create_directories(instance);
    for (const fs::path& dir : {folder_ / "holder", instance}) {
      fs::permissions(dir, fs::perms::owner_all);
    }
    for (const auto& run : fs::directory_iterator(folder_ / "run")) {
      for (const auto& name : fs::directory_iterator(run.path() / "replay")) {
        const std::string file = name.path().filename();
        if (!name.is_socket() || file == "registry" || file == "control") continue;
        fs::create_symlink(name.path(), instance / file);
      }
    }
    return start_second_mover(children().at("mover/0"), path("holder"));
  }
};

TEST_F(UnknownHolderTest, ALossOfOffloadIsSaidCountedAndOverWithItsCause) {
  start_replay(slower_trace(), {"--speed=1"});
  ChildProcess holder = start_holder();
  EXPECT_TRUE(wait_until([this] {
    return running_->stderr_text().find("offload is not ready") != std::string::npos;
  })) << holder.stderr_text();
  holder.signal(SIGTERM);
  EXPECT_EQ(finish_replay(), ChildExit::exited(0)) << running_->stderr_text();
  EXPECT_THAT(running_->stderr_text(), HasSubstr("offload is ready again after"));
  EXPECT_GT(report()["offload_down_s"].get<double>(), 1.0);
  EXPECT_EQ(report()["blocks_corrupt"], 0);
}

TEST_F(UnknownHolderTest, ALossOfOffloadThatLastsFailsTheRunWithItsReason) {
  start_replay(write_trace(kRequests, 30, 10 * kGapMs), {"--speed=1", "--stall-timeout=4s"});
  const ChildProcess holder = start_holder();
  EXPECT_EQ(finish_replay(), ChildExit::exited(1)) << running_->stderr_text();
  EXPECT_THAT(running_->stderr_text(), HasSubstr("although no process died: worker/0"));
  EXPECT_LT(report()["requests"], kRequests);
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
