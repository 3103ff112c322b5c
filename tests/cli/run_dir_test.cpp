// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "run/run_dir.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <optional>
#include <string>

namespace kvferry::cli {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::IsEmpty;

class RunDirTest : public testing::Test {
 protected:
  RunDirTest() {
    std::string name = testing::TempDir() + "kvferry-rundir-XXXXXX";
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    base_ = name;
  }
  ~RunDirTest() override { fs::remove_all(base_); }

  [[nodiscard]] RunDir make() {
    auto made = RunDir::create(base_);
    EXPECT_TRUE(made) << made.error().message;
    return std::move(made).value();
  }
  /// What a killed listener leaves.
  static void leave_socket(const fs::path& path) {
    const ipc::UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    ASSERT_LT(path.native().size(), sizeof(address.sun_path));
    std::copy(path.native().begin(), path.native().end(), address.sun_path);
    ASSERT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  }

  std::string base_;
};

TEST_F(RunDirTest, IsPrivateAndGoneAtItsEnd) {
  {
    const RunDir dir = make();
    struct stat info {};
    ASSERT_EQ(stat(dir.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777U, 0700U);
    EXPECT_TRUE(fs::is_directory(dir.logs()));
    std::ofstream(dir.logs() / "manager.log") << "text";
    fs::create_directory(dir.path() / "replay");
    std::ofstream(dir.path() / "replay" / "left");
  }
  EXPECT_TRUE(fs::is_empty(base_));
}

TEST_F(RunDirTest, RemovesWhatAKilledReplayLeftAndNothingElse) {
  const RunDir living = make();
  const fs::path dead = fs::path(base_) / "replay-deadbeef";
  const fs::path other = fs::path(base_) / "default";
  for (const fs::path& path : {dead, other}) {
    fs::create_directory(path);
    fs::permissions(path, fs::perms::owner_all);
  }
  std::ofstream(dead / "registry");
  // One that is being made: held, and without its lock yet. How old it looks says nothing.
  const auto young_dir = ipc::RuntimeDir::open(base_, "replay-12345678");
  ASSERT_TRUE(young_dir);
  const fs::path young = young_dir->path();
  fs::last_write_time(young, fs::file_time_type::clock::now() - std::chrono::hours(1));
  const RunDir next = make();
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_TRUE(fs::exists(young));
  EXPECT_TRUE(fs::exists(other));
  EXPECT_TRUE(fs::exists(living.path()));
}

TEST_F(RunDirTest, NamesWhatIsLeftAndRemovesOnlyWhatNobodyHolds) {
  const RunDir dir = make();
  const fs::path instance = dir.path() / "replay";
  const auto open = ipc::RuntimeDir::open(dir.path().native(), "replay");
  ASSERT_TRUE(open);
  EXPECT_THAT(dir.leftovers("replay"), IsEmpty());
  // A killed process leaves name and lock file, and the kernel drops its lock.
  leave_socket(instance / "registry");
  leave_socket(instance / "control");
  std::ofstream(instance / "registry.lock");
  std::ofstream(instance / "nobodys");
  dir.remove_stale_names("replay");
  EXPECT_THAT(dir.leftovers("replay"), ElementsAre((instance / "nobodys").string()));
}

}  // namespace
}  // namespace kvferry::cli
