// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// kvferry where signals interrupt everything, the clock jumps, the kernel is older, or processes
// live in other namespaces than their peers.
#include "cli/daemons_fixture.hpp"
#include "environment/odd.hpp"

#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace kvferry::test {
namespace {

using testing::HasSubstr;
using testing::Not;

Finished run_to_end(ChildOptions options, std::chrono::seconds limit = std::chrono::seconds(90)) {
  ChildProcess child(std::move(options));
  child.close_stdin();
  const ipc::Deadline deadline = ipc::Deadline::after(limit);
  Finished finished;
  while (const auto line = child.read_line(deadline)) finished.output += *line + "\n";
  finished.exit = child.wait(deadline);
  finished.complaints = child.stderr_text();
  return finished;
}

// ---- around a whole replay ----

class OddReplayTest : public ReplayTest, public testing::WithParamInterface<std::size_t> {};

INSTANTIATE_TEST_SUITE_P(Oddities,
                         OddReplayTest,
                         testing::Range<std::size_t>(0, kOddNames.size()),
                         [](const auto& odd) {
                           std::string name = kOddNames.at(odd.param);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(OddReplayTest, NothingIsLostOrLeftBehind) {
  const std::string counts = path("counts");
  std::ofstream(counts) << "";
  std::filesystem::resize_file(counts, sizeof(OddCounts));
  std::vector<std::string> arguments =
      replay_arguments(write_trace(120), {"--ranks=2", "--clear-every=40", "--verify=full"});
  const Finished run =
      run_to_end({.program = KVFERRY_PROGRAM,
                  .arguments = arguments,
                  .environment = {"LD_PRELOAD=" KVFERRY_ODD_LIBRARY,
                                  std::string(kOddVariable) + "=" + kOddNames.at(GetParam()),
                                  std::string(kOddCountsVariable) + "=" + counts}});
  EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  EXPECT_EQ(report()["blocks_corrupt"], 0);
  EXPECT_EQ(report()["leftover_names"], 0);
  EXPECT_EQ(report()["restarts"], 0) << run.complaints;
  EXPECT_THAT(run.complaints, Not(HasSubstr("transitions are not recorded")));
  std::array<std::uint64_t, kOddNames.size()> done{};
  std::ifstream(counts, std::ios::binary).read(reinterpret_cast<char*>(done.data()), sizeof(done));
  EXPECT_GT(done.at(GetParam()), 0U) << "it was not odd at all";
}

// ---- around a soak ----

class OddSoakTest : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Owners, OddSoakTest, testing::Values("worker", "mover"));

// Whoever is replaced gets the number of the dead one, and the engine forks children.
TEST_P(OddSoakTest, KillsUnderAllOfItLeaveNothing) {
  const std::vector<std::string> alone = {"--user", "--map-root-user", "--pid", "--fork",
                                          "--mount-proc"};
  std::vector<std::string> probe = alone;
  probe.insert(probe.end(), {"/bin/sh", "-c", "echo 300 > /proc/sys/kernel/ns_last_pid"});
  if (run_to_end({.program = "/usr/bin/unshare", .arguments = probe}).exit !=
      ChildExit::exited(0)) {
    GTEST_SKIP() << "no pid namespaces with numbers to choose here";
  }
  std::vector<std::string> arguments = alone;
  arguments.insert(arguments.end(),
                   {KVFERRY_SOAK, "--cycles=60", "--kills=0.4", "--stops=0",
                    std::string("--owner=") + GetParam(), "--look-every=5", "--reuse-pids",
                    "--forks=0.3", "--odd=eintr,clock,old-kernel"});
  const Finished run = run_to_end({.program = "/usr/bin/unshare", .arguments = arguments});
  EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  EXPECT_THAT(run.output, Not(HasSubstr("FAILED")));
}

// ---- namespaces and limits of daemons ----

class OddDaemonsTest : public DaemonsTest {
 protected:
  [[nodiscard]] Finished run_in(const std::vector<std::string>& namespaces,
                                const std::vector<std::string>& command) const {
    return run_to_end(wrapped(namespaces, command));
  }
  [[nodiscard]] static ChildOptions wrapped(const std::vector<std::string>& namespaces,
                                            const std::vector<std::string>& command) {
    std::vector<std::string> arguments = {"--user", "--map-root-user"};
    arguments.insert(arguments.end(), namespaces.begin(), namespaces.end());
    arguments.insert(arguments.end(), command.begin(), command.end());
    return {.program = "/usr/bin/unshare", .arguments = arguments};
  }
  [[nodiscard]] std::vector<std::string> rank_command(const std::string& role) const {
    std::vector<std::string> command = common(role);
    command.insert(command.begin(), KVFERRY_PROGRAM);
    command.insert(command.end(), {"--geometry=tiny", "--gpu-blocks=32", "--device=" + device()});
    return command;
  }
  static bool has(const std::vector<std::string>& namespaces) {
    return run_to_end(wrapped(namespaces, {"/bin/true"})).exit == ChildExit::exited(0);
  }
};

// Their numbers mean nothing to each other, and legacy handles do not work: said, never waited out.
TEST_F(OddDaemonsTest, APeerInAnotherPidNamespaceIsRefusedByName) {
  if (!has({"--pid", "--fork", "--mount-proc"})) GTEST_SKIP() << "no pid namespaces here";
  ChildProcess& manager = start("manager");
  ASSERT_TRUE(wait_status([](const nlohmann::json&) { return true; })) << manager.stderr_text();
  for (const char* role : {"worker", "mover"}) {
    const Finished run = run_in({"--pid", "--fork", "--mount-proc"}, rank_command(role));
    EXPECT_EQ(run.exit, ChildExit::exited(5)) << run.complaints;
    EXPECT_THAT(run.complaints, HasSubstr("in another pid namespace")) << role;
  }
  EXPECT_TRUE(wait_status([](const nlohmann::json&) { return true; })) << manager.stderr_text();
}

TEST_F(OddDaemonsTest, AProcOfAnotherPidNamespaceIsRefused) {
  if (!has({"--pid", "--fork"})) GTEST_SKIP() << "no pid namespaces here";
  for (const char* role : {"worker", "mover"}) {
    const Finished run = run_in({"--pid", "--fork"}, rank_command(role));
    EXPECT_EQ(run.exit, ChildExit::exited(5)) << run.complaints;
    EXPECT_THAT(run.complaints, HasSubstr("/proc belongs to another pid namespace")) << role;
  }
}

// Clocks and start times are shifted there: nothing that peers tell each other may be a time of day
// or of the machine's start.
TEST_F(OddDaemonsTest, PeersInAnotherTimeNamespaceWorkTogether) {
  const std::vector<std::string> shifted = {"--time", "--monotonic=100000", "--boottime=100000",
                                            "--kill-child"};
  if (!has(shifted)) GTEST_SKIP() << "no time namespaces here";
  start("manager");
  start("worker");
  running_.push_back(std::make_unique<ChildProcess>(wrapped(shifted, rank_command("mover"))));
  ChildProcess& mover = *running_.back();
  ASSERT_TRUE(wait_status(offload_ready)) << mover.stderr_text();
  const Finished cleared = ask("clear");
  EXPECT_EQ(cleared.exit, ChildExit::exited(0)) << cleared.complaints;
  EXPECT_EQ(ask("reinit").exit, ChildExit::exited(0));
  ASSERT_TRUE(wait_status(offload_ready)) << mover.stderr_text();
  // A name is not taken from a living holder whose start looks different from there.
  const Finished second = run_in(shifted, rank_command("worker"));
  EXPECT_EQ(second.exit, ChildExit::exited(1)) << second.complaints;
  EXPECT_THAT(second.complaints, HasSubstr("is held by process"));
  EXPECT_TRUE(wait_status(offload_ready)) << mover.stderr_text();
}

TEST_F(OddDaemonsTest, ALimitOnTheSizeOfFilesIsAnErrorAndNoSignal) {
  const std::vector<std::string> manager = common("manager");
  std::string command = "ulimit -f 0; exec '" KVFERRY_PROGRAM "'";
  for (const std::string& argument : manager) command += " '" + argument + "'";
  command += " 2>&1";  // Into a pipe, which has no size.
  const Finished run = run_to_end({.program = "/bin/bash", .arguments = {"-c", command}});
  EXPECT_FALSE(run.exit->by_signal) << "signal " << run.exit->code;
  EXPECT_NE(run.exit->code, 0);
  EXPECT_THAT(run.output, HasSubstr("File too large"));
}

}  // namespace
}  // namespace kvferry::test
