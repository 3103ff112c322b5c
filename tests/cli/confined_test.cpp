// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "cli/replay_fixture.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

// kvferry where /dev/shm or the runtime directory is full, missing or read-only: in a mount
// namespace of its own, on small tmpfs mounts.
namespace kvferry::test {
namespace {

using testing::HasSubstr;

class ConfinedTest : public ReplayTest {
 protected:
  void SetUp() override {
    const Finished probe = confined("true");
    if (probe.exit != ChildExit::exited(0)) {
      GTEST_SKIP() << "no mount namespaces here: " << probe.complaints;
    }
  }

  // Runs a shell script as root of new user and mount namespaces.
  Finished confined(const std::string& script) {
    ChildProcess child(ChildOptions{
        "/usr/bin/unshare", {"--user", "--map-root-user", "--mount", "/bin/sh", "-euc", script}});
    child.close_stdin();
    Finished finished;
    finished.exit = child.wait(ipc::Deadline::after(std::chrono::seconds(60)));
    while (const auto line = child.read_line(soon())) finished.output += *line + "\n";
    finished.complaints = child.stderr_text();
    return finished;
  }

  static std::string tmpfs(const std::string& options, const std::string& where) {
    return "mount -t tmpfs -o " + options + " tmpfs '" + where + "'; ";
  }

  std::string replay_command(const std::vector<std::string>& more = {}) {
    std::string command = "exec '" KVFERRY_PROGRAM "'";
    for (const std::string& argument : replay_arguments(write_trace(60), more)) {
      command += " '" + argument + "'";
    }
    return command;
  }
};

TEST_F(ConfinedTest, FullDevShmDoesNotMatter) {
  const Finished run = confined(tmpfs("size=4k", "/dev/shm") +
                                "head -c 4096 /dev/zero > /dev/shm/full; " + replay_command());
  EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  EXPECT_EQ(report()["blocks_corrupt"], 0);
}

TEST_F(ConfinedTest, ReadOnlyDevShmDoesNotMatter) {
  const Finished run = confined(tmpfs("ro,size=4k", "/dev/shm") + replay_command());
  EXPECT_EQ(run.exit, ChildExit::exited(0)) << run.output << run.complaints;
  EXPECT_EQ(report()["blocks_corrupt"], 0);
}

TEST_F(ConfinedTest, ReadOnlyRuntimeDirectoryIsNamed) {
  const std::string run_dir = path("run-ro");
  std::filesystem::create_directory(run_dir);
  for (const std::string command : {"manager", "status"}) {
    const Finished run =
        confined(tmpfs("ro,size=4k,mode=0700", run_dir) + "exec '" KVFERRY_PROGRAM "' " + command +
                 " --runtime-dir '" + run_dir + "'");
    // A daemon that cannot run, and a command that finds no manager.
    EXPECT_EQ(run.exit, ChildExit::exited(command == "manager" ? 5 : 3)) << run.complaints;
    EXPECT_THAT(run.complaints, HasSubstr(run_dir));
  }
}

TEST_F(ConfinedTest, FullRuntimeDirectoryIsNamed) {
  const std::string run_dir = path("run-full");
  std::filesystem::create_directory(run_dir);
  // The root and one more: the instance's directory fits, its locks and sockets do not.
  const Finished run =
      confined(tmpfs("size=64k,nr_inodes=2,mode=0700", run_dir) +
               "exec '" KVFERRY_PROGRAM "' manager --runtime-dir '" + run_dir + "'");
  EXPECT_EQ(run.exit, ChildExit::exited(5)) << run.complaints;
  EXPECT_THAT(run.complaints, HasSubstr(run_dir));
  EXPECT_THAT(run.complaints, HasSubstr("No space left"));
}

TEST_F(ConfinedTest, MoreHostMemoryThanThereIsIsRefusedNamingBoth) {
  const Finished run =
      run_kvferry({"manager", "--runtime-dir", path("run-big"), "--host-memory", "900TiB"});
  EXPECT_EQ(run.exit, ChildExit::exited(5)) << run.complaints;
  EXPECT_THAT(run.complaints, HasSubstr("no_host_memory"));
  EXPECT_THAT(run.complaints, HasSubstr("900"));
}

}  // namespace
}  // namespace kvferry::test
