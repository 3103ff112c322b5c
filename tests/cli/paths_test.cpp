// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
// Something else lies where a daemon makes its sockets, locks and rings: it is told, and nothing is
// written through it, over it or behind it.
#include "cli/daemons_fixture.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>

namespace kvferry::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kPrecious = "precious\n";
constexpr const char* kObstacles[] = {"file", "link", "dangling", "folder", "fifo"};

class PathsTest : public DaemonsTest {
 protected:
  PathsTest() {
    fs::create_directory(temp_ / "run");
    fs::create_directory(instance_);
    EXPECT_EQ(::chmod((temp_ / "run").c_str(), 0700), 0);
    EXPECT_EQ(::chmod(instance_.c_str(), 0700), 0);
    fs::create_directory(outside_);
    std::ofstream(outside_ / "file") << kPrecious;
  }
  void put(const std::string& obstacle, const fs::path& path) const {
    if (obstacle == "file") std::ofstream(path) << kPrecious;
    if (obstacle == "link") fs::create_symlink(outside_ / "file", path);
    if (obstacle == "dangling") fs::create_symlink(outside_ / "nothing", path);
    if (obstacle == "folder") fs::create_directory(path);
    if (obstacle == "fifo") (void)::mkfifo(path.c_str(), 0600);
    ASSERT_TRUE(fs::exists(fs::symlink_status(path)));
  }
  static std::string read(const fs::path& path) {
    std::ifstream in(path);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  void expect_untouched(const std::string& obstacle, const fs::path& path) const {
    EXPECT_TRUE(fs::exists(fs::symlink_status(path))) << "it was removed";
    EXPECT_TRUE(obstacle != "file" || read(path) == kPrecious) << "it was written to";
    EXPECT_EQ(read(outside_ / "file"), kPrecious);
    EXPECT_EQ(std::distance(fs::directory_iterator(outside_), {}), 1) << "written behind the link";
  }
  /// Starts the daemon with each obstacle at the name.
  void expect_refused(const std::string& daemon, const std::string& name) {
    for (const std::string obstacle : kObstacles) {
      SCOPED_TRACE(fmt::format("{}: {} is a {}", daemon, name, obstacle));
      // What a holder that died has left in its lock is no obstacle, whatever it says.
      if (obstacle == "file" && name.ends_with(".lock")) continue;
      const fs::path path = instance_ / name;
      ASSERT_NO_FATAL_FAILURE(put(obstacle, path));
      ChildProcess& child = start(daemon);
      const auto exit = child.wait(soon());
      ASSERT_TRUE(exit.has_value()) << "it runs\n" << child.stderr_text();
      EXPECT_FALSE(exit->by_signal) << child.stderr_text();
      EXPECT_NE(exit->code, 0);
      EXPECT_THAT(child.stderr_text(), HasSubstr(path.native()));
      expect_untouched(obstacle, path);
      fs::remove(path);
      running_.clear();
      EXPECT_TRUE(fs::is_empty(instance_)) << "names are left";
    }
  }
  void end_all() {
    for (const auto& child : running_) child->signal(SIGTERM);
    for (const auto& child : running_) {
      EXPECT_EQ(child->wait(soon()), ChildExit::exited(0)) << child->stderr_text();
    }
    running_.clear();
  }

  const fs::path instance_ = temp_ / "run" / "chat";
  const fs::path outside_ = temp_ / "outside";
};

class OccupiedPathTest : public PathsTest,
                         public testing::WithParamInterface<std::pair<const char*, const char*>> {};

INSTANTIATE_TEST_SUITE_P(Names,
                         OccupiedPathTest,
                         testing::Values(std::pair{"manager", "registry"},
                                         std::pair{"manager", "registry.lock"},
                                         std::pair{"manager", "control"},
                                         std::pair{"manager", "manager.lock"},
                                         std::pair{"worker", "default.0.lease"},
                                         std::pair{"worker", "default.0.lease.lock"},
                                         std::pair{"worker", "default.0.agent"},
                                         std::pair{"worker", "default.0.agent.lock"},
                                         std::pair{"worker", "default.0.step"},
                                         std::pair{"worker", "default.0.step.lock"},
                                         std::pair{"worker", "default.0.stepctl"}),
                         [](const auto& way) {
                           std::string name = std::string(way.param.first) + "_" + way.param.second;
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

TEST_P(OccupiedPathTest, IsToldAndLeftAlone) {
  expect_refused(GetParam().first, GetParam().second);
}

TEST_F(PathsTest, InstanceThatIsALinkIsRefused) {
  fs::remove(instance_);
  fs::create_directory_symlink(outside_, instance_);
  ASSERT_EQ(::chmod(outside_.c_str(), 0700), 0);
  for (const char* daemon : {"manager", "worker", "mover"}) {
    ChildProcess& child = start(daemon);
    const auto exit = child.wait(soon());
    ASSERT_TRUE(exit.has_value()) << daemon;
    EXPECT_NE(exit->code, 0) << daemon;
    EXPECT_THAT(child.stderr_text(), HasSubstr("symbolic link")) << daemon;
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(outside_), {}), 1);
}

// Nothing that matters is in these: without them the daemons run as well.
TEST_F(PathsTest, WithoutRingsAndMeetingPlaceTheDaemonsRunAndTouchNothingElse) {
  for (const char* name : {"one", "two", "three"}) std::ofstream(outside_ / name) << kPrecious;
  const auto count = std::distance(fs::directory_iterator(outside_), {});
  for (const std::string obstacle : {"file", "link to a folder"}) {
    SCOPED_TRACE(obstacle);
    if (obstacle == "file") {
      put(obstacle, instance_ / "transitions");
    } else {
      fs::create_directory_symlink(outside_, instance_ / "transitions");
    }
    put("link", instance_ / "default.0.seek");
    put("dangling", instance_ / "default.0.seek.lock");
    ChildProcess& mover = start("mover");  // First, so that it looks for whom to meet.
    start("manager");
    ChildProcess& worker = start("worker");
    ASSERT_TRUE(wait_status(offload_ready)) << mover.stderr_text();
    EXPECT_THAT(worker.stderr_text(), HasSubstr("transitions are not recorded"));
    end_all();
    EXPECT_EQ(std::distance(fs::directory_iterator(outside_), {}), count);
    for (const auto& entry : fs::directory_iterator(outside_)) {
      EXPECT_EQ(read(entry.path()), kPrecious) << entry.path();
    }
    for (const char* name : {"transitions", "default.0.seek", "default.0.seek.lock"}) {
      EXPECT_TRUE(fs::remove(instance_ / name)) << name << " was removed";
    }
  }
}

}  // namespace
}  // namespace kvferry::test
