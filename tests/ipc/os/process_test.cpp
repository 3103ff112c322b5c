// SPDX-FileCopyrightText: The kvferry authors
// SPDX-License-Identifier: Apache-2.0
#include "kvferry/ipc/os/process.hpp"

#include "ipc/os/temp_dir.hpp"
#include "kvferry/ipc/os/packet_socket.hpp"
#include "support/child_process.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace kvferry::ipc {
namespace {

using test::ChildExit;
using test::ChildProcess;
using test::soon;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

ChildProcess start(std::vector<std::string> arguments) {
  return ChildProcess(
      {.program = test::sibling_program("kvferry_os_child"), .arguments = std::move(arguments)});
}

PacketSocket accept_one(PacketListener& listener) {
  for (;;) {
    auto socket = listener.try_accept();
    EXPECT_TRUE(socket.has_value());
    if (socket->has_value()) return std::move(**socket);
  }
}

/// A lock file of a holder that has not written it yet.
class LockedFile {
 public:
  explicit LockedFile(const std::filesystem::path& path)
      : fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    struct flock held {};
    held.l_type = F_WRLCK;
    held.l_whence = SEEK_SET;
    held.l_len = 1;
    EXPECT_EQ(::fcntl(fd_.get(), F_OFD_SETLK, &held), 0);
  }

 private:
  UniqueFd fd_;
};

// Both ways to a peer's pidfd: the kernel's own, and the fallback of older kernels.
class PeerProcessTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    // NOLINTNEXTLINE(concurrency-mt-unsafe): this process has one thread.
    ASSERT_EQ(::setenv("KVFERRY_FORCE_PIDFD_FALLBACK", GetParam() ? "1" : "0", 1), 0);
  }
  // NOLINTNEXTLINE(concurrency-mt-unsafe): this process has one thread.
  void TearDown() override { ::unsetenv("KVFERRY_FORCE_PIDFD_FALLBACK"); }

  test::ShortTempDir dir_;
  PacketListener listener_ = *PacketListener::listen(dir_ / "socket");
  ChildProcess child_ = start({"connect", (dir_ / "socket").native()});
};

INSTANTIATE_TEST_SUITE_P(BothPaths, PeerProcessTest, ::testing::Bool(), [](const auto& way) {
  return way.param ? "Fallback" : "PeerPidfd";
});

TEST_P(PeerProcessTest, TellsAStoppedProcessFromOneThatRunsOrIsDead) {
  ASSERT_TRUE(child_.wait_line("ok", soon()));
  const PacketSocket socket = accept_one(listener_);
  const auto peer = socket.peer();
  ASSERT_TRUE(peer.has_value()) << peer.error().to_string();
  EXPECT_FALSE(peer->is_stopped());
  child_.signal(SIGSTOP);
  int status = 0;
  ASSERT_EQ(::waitpid(child_.pid(), &status, WUNTRACED), child_.pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_TRUE(peer->is_stopped());
  child_.signal(SIGCONT);
  ASSERT_EQ(::waitpid(child_.pid(), &status, WCONTINUED), child_.pid());
  EXPECT_FALSE(peer->is_stopped());
  child_.kill();
  ASSERT_TRUE(child_.wait_zombie(soon()));
  EXPECT_FALSE(peer->is_stopped());
  EXPECT_FALSE(ProcessRef().is_stopped());
}

TEST_P(PeerProcessTest, NamesThePeerAndSeesItsDeathWhileItIsAZombie) {
  ASSERT_TRUE(child_.wait_line("ok", soon()));
  const PacketSocket socket = accept_one(listener_);
  const auto peer = socket.peer();
  ASSERT_TRUE(peer.has_value()) << peer.error().to_string();
  EXPECT_EQ(peer->pid(), child_.pid());
  EXPECT_GT(peer->start_time(), 0U);
  EXPECT_EQ(peer->start_time(), ProcessRef::of_pid(child_.pid())->start_time());
  EXPECT_FALSE(peer->has_died());
  EXPECT_FALSE(peer->wait_death(Deadline::after(std::chrono::milliseconds(1))));
  child_.kill();
  EXPECT_TRUE(peer->wait_death(soon()));
  EXPECT_TRUE(peer->has_died());
  EXPECT_EQ(::kill(child_.pid(), 0), 0) << "not reaped yet: kill() still calls it alive";
  EXPECT_EQ(child_.wait(soon()), ChildExit::killed_by(SIGKILL));
  EXPECT_TRUE(peer->has_died());
  EXPECT_EQ(peer->signal(SIGTERM).error().code, ErrorCode::kPeerDied);
}

TEST_P(PeerProcessTest, AStoppedPeerIsNotDead) {
  ASSERT_TRUE(child_.wait_line("ok", soon()));
  const PacketSocket socket = accept_one(listener_);
  const ProcessRef peer = *socket.peer();
  ASSERT_TRUE(peer.signal(SIGSTOP).has_value());
  EXPECT_FALSE(peer.wait_death(Deadline::after(std::chrono::milliseconds(20))));
  ASSERT_TRUE(peer.signal(SIGKILL).has_value());
  EXPECT_TRUE(peer.wait_death(soon()));
}

TEST_P(PeerProcessTest, APeerThatDiedBeforeItWasIdentifiedIsAnError) {
  ASSERT_TRUE(child_.wait_line("ok", soon()));
  const PacketSocket socket = accept_one(listener_);
  child_.kill();
  ASSERT_TRUE(child_.wait_zombie(soon()));
  EXPECT_EQ(socket.peer().error().code, ErrorCode::kPeerDied) << "as a zombie";
  ASSERT_TRUE(child_.wait(soon()).has_value());
  EXPECT_EQ(socket.peer().error().code, ErrorCode::kPeerDied) << "reaped";
}

TEST_P(PeerProcessTest, AClosedSocketIsNotTrustedByTheFallback) {
  ASSERT_TRUE(child_.wait_line("ok", soon()));
  const PacketSocket socket = accept_one(listener_);
  ASSERT_TRUE(child_.write_line("close"));
  ASSERT_TRUE(child_.wait_line("done", soon()));
  const auto peer = socket.peer();
  if (GetParam()) {
    ASSERT_FALSE(peer.has_value());
    EXPECT_EQ(peer.error().code, ErrorCode::kPeerDied);
  } else {
    ASSERT_TRUE(peer.has_value());
    EXPECT_EQ(peer->pid(), child_.pid());
  }
}

TEST(ProcessRefTest, NothingIsNeverDead) {
  const ProcessRef nothing;
  EXPECT_FALSE(nothing.valid());
  EXPECT_FALSE(nothing.has_died());
  EXPECT_EQ(ProcessRef::of_pid(0).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(ProcessRef::of_pid(1 << 30).error().code, ErrorCode::kPeerDied);
}

TEST(ProcessRefTest, StartTimeSurvivesBracketsInTheProgramName) {
  const test::ShortTempDir dir;
  const std::string odd = (dir / "a) R 1 (b").native();
  std::filesystem::copy_file("/bin/cat", odd);
  ChildProcess child({.program = odd});
  const auto process = ProcessRef::of_pid(child.pid());
  ASSERT_TRUE(process.has_value()) << process.error().to_string();
  const auto self = ProcessRef::of_pid(::getpid());
  EXPECT_GE(process->start_time(), self->start_time());
}

TEST(NameLockProcessTest, ADeadHoldersNameIsTakenOver) {
  const test::ShortTempDir dir;
  const std::string name = (dir / "name").native();
  ChildProcess holder = start({"lock", name});
  ASSERT_TRUE(holder.wait_line("ok", soon()));
  const auto refused = NameLock::acquire(name);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kAlreadyExists);
  EXPECT_THAT(refused.error().message, HasSubstr(std::to_string(holder.pid())));
  holder.kill();
  ASSERT_TRUE(holder.wait_zombie(soon()));
  EXPECT_TRUE(std::filesystem::exists(name + ".lock"));
  EXPECT_TRUE(NameLock::acquire(name).has_value()) << "while the holder is still a zombie";
}

TEST(NameLockProcessTest, ALockIsNotInheritedByChildren) {
  const test::ShortTempDir dir;
  std::optional<NameLock> lock = *NameLock::acquire(dir / "name");
  const ChildProcess child = start({"lock", (dir / "other").native()});
  lock.reset();
  EXPECT_TRUE(NameLock::acquire(dir / "name").has_value());
}

/// A helper that holds the name, dies, and leaves a forked child that inherited everything. The
/// child ends with the helper's stdin.
struct Orphan {
  ChildProcess parent;
  ProcessRef child;

  Orphan(const std::string& mode, const std::string& name) : parent(start({mode, name})) {
    EXPECT_TRUE(parent.wait_line("ok", soon()));
    EXPECT_TRUE(parent.write_line("fork"));
    std::string said = parent.read_line(soon()).value_or("");
    EXPECT_THAT(said, StartsWith("keeper "));
    child = ProcessRef::of_pid(std::stoi(said.substr(said.find(' ')))).value();
    parent.kill();
    EXPECT_TRUE(parent.wait(soon()).has_value());
    EXPECT_FALSE(child.has_died());
  }
  void end_child() {
    parent.close_stdin();
    EXPECT_TRUE(child.wait_death(soon()));
  }
};

TEST(NameLockProcessTest, AForkedChildOfADeadHolderKeepsNoName) {
  const test::ShortTempDir dir;
  const std::string name = (dir / "name").native();
  Orphan orphan("lock", name);
  const auto lock = NameLock::acquire(name);
  ASSERT_TRUE(lock.has_value()) << lock.error().to_string();
  // Its end takes nothing from the successor.
  orphan.end_child();
  EXPECT_TRUE(std::filesystem::exists(name + ".lock"));
  const auto refused = NameLock::acquire(name);
  ASSERT_FALSE(refused.has_value());
  EXPECT_THAT(refused.error().message, HasSubstr(std::to_string(::getpid())));
}

TEST(NameLockProcessTest, AForkedChildOfALivingHolderKeepsTheNameForIt) {
  const test::ShortTempDir dir;
  const std::string name = (dir / "name").native();
  ChildProcess holder = start({"lock", name});
  ASSERT_TRUE(holder.wait_line("ok", soon()));
  ASSERT_TRUE(holder.write_line("fork"));
  ASSERT_TRUE(holder.read_line(soon()).has_value());
  EXPECT_EQ(NameLock::acquire(name).error().code, ErrorCode::kAlreadyExists);
  EXPECT_FALSE(NameLock::remove_if_stale(name));
  holder.close_stdin();  // both end; the name goes once, and by its holder
  ASSERT_TRUE(holder.wait(soon()).has_value());
  EXPECT_TRUE(NameLock::acquire(name).has_value());
}

TEST(NameLockProcessTest, OneOfManySuccessorsGetsTheNameOfADeadHolder) {
  for (int round = 0; round < 5; ++round) {
    const test::ShortTempDir dir;
    const std::string name = (dir / "name").native();
    Orphan orphan("lock", name);
    std::vector<ChildProcess> heirs;
    for (int i = 0; i < 6; ++i) heirs.push_back(start({"lock", name}));
    int winners = 0;
    for (ChildProcess& heir : heirs) {
      const std::string said = heir.read_line(soon()).value_or("nothing");
      winners += said == "ok" ? 1 : 0;
      EXPECT_TRUE(said == "ok" || said.find("held by") != std::string::npos) << said;
    }
    EXPECT_EQ(winners, 1);
    orphan.end_child();
  }
}

TEST(NameLockProcessTest, StaleNamesAreSweptAndOthersAreNot) {
  const test::ShortTempDir base;
  const auto dir = RuntimeDir::open(base.path().native(), "one");
  ASSERT_TRUE(dir.has_value());
  const Orphan orphan("listen", dir->path() / "orphan");
  ChildProcess killed = start({"listen", (dir->path() / "killed").native()});
  ASSERT_TRUE(killed.wait_line("ok", soon()));
  killed.kill();
  ASSERT_TRUE(killed.wait(soon()).has_value());
  ChildProcess living = start({"listen", (dir->path() / "living").native()});
  ASSERT_TRUE(living.wait_line("ok", soon()));
  // Made and not locked: its process died between the two.
  std::ofstream(dir->path() / "begun.lock") << "";
  const LockedFile starting(dir->path() / "starting.lock");
  std::ofstream(dir->path() / "other") << "not ours";
  EXPECT_THAT(dir->remove_stale_names(), UnorderedElementsAre("killed", "orphan", "begun"));
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(dir->path())) {
    left.push_back(entry.path().filename());
  }
  EXPECT_THAT(left, UnorderedElementsAre("living", "living.lock", "starting.lock", "other"));
  EXPECT_THAT(dir->remove_stale_names(), IsEmpty());
  EXPECT_TRUE(PacketSocket::connect(dir->path() / "living", soon()).has_value());
}

TEST(NameLockProcessTest, ANameThatIsLockedAndNotWrittenYetIsSomebodys) {
  const test::ShortTempDir dir;
  {
    const LockedFile starting(dir / "name.lock");
    const auto refused = NameLock::acquire(dir / "name");
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().code, ErrorCode::kAlreadyExists);
    EXPECT_THAT(refused.error().message, HasSubstr("just starting"));
    EXPECT_FALSE(NameLock::remove_if_stale(dir / "name"));
  }
  EXPECT_TRUE(NameLock::remove_if_stale(dir / "name"));
  EXPECT_FALSE(std::filesystem::exists(dir / "name.lock"));
  EXPECT_TRUE(NameLock::acquire(dir / "name").has_value());
}

// Those who tidy up take every lock file that is made and not locked yet for one that was left.
TEST(NameLockProcessTest, ANameHasOneHolderWhileOthersRemoveWhatLooksLeft) {
  const test::ShortTempDir dir;
  const std::filesystem::path name = dir / "name";
  std::atomic<int> holders{0};
  std::atomic<int> taken{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      while (!over) (void)NameLock::remove_if_stale(name);
    });
  }
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!over) {
        const auto lock = NameLock::acquire(name);
        if (!lock) continue;
        EXPECT_EQ(++holders, 1);
        EXPECT_TRUE(std::filesystem::exists(dir / "name.lock"));
        --holders;
        if (++taken == 500) over = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(holders, 0);
  EXPECT_FALSE(std::filesystem::exists(dir / "name.lock"));
}

TEST(NameLockProcessTest, TheLastOneToLeaveTakesTheNamesOfKilledProcessesAlong) {
  const test::ShortTempDir base;
  auto dir = RuntimeDir::open(base.path().native(), "one");
  ASSERT_TRUE(dir.has_value());
  const std::filesystem::path path = dir->path();
  ChildProcess killed = start({"listen", (path / "killed").native()});
  ASSERT_TRUE(killed.wait_line("ok", soon()));
  killed.kill();
  ASSERT_TRUE(killed.wait(soon()).has_value());
  std::ofstream(path / "starting.lock") << "";  // of one that died between two system calls
  EXPECT_TRUE(std::filesystem::exists(path / "killed"));
  dir = KVFERRY_ERROR(kCancelled, "let go");
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(PacketListenerProcessTest, AForkedChildOfADeadListenerKeepsNoConnection) {
  const test::ShortTempDir dir;
  const std::string path = (dir / "socket").native();
  Orphan orphan("listen", path);
  auto listener = PacketListener::listen(path);
  ASSERT_TRUE(listener.has_value()) << listener.error().to_string();
  orphan.end_child();
  EXPECT_TRUE(PacketSocket::connect(path, soon()).has_value());
  EXPECT_TRUE(accept_one(*listener).peer().has_value());
}

TEST(PacketListenerProcessTest, AStaleSocketIsReplacedAndALivingOneRefused) {
  const test::ShortTempDir dir;
  const std::string path = (dir / "socket").native();
  ChildProcess listening = start({"listen", path});
  ASSERT_TRUE(listening.wait_line("ok", soon()));
  EXPECT_EQ(PacketListener::listen(path).error().code, ErrorCode::kAlreadyExists);
  EXPECT_TRUE(PacketSocket::connect(path, soon()).has_value());
  listening.kill();
  ASSERT_TRUE(listening.wait(soon()).has_value());
  EXPECT_TRUE(std::filesystem::exists(path));
  EXPECT_EQ(PacketSocket::connect(path, soon()).error().code, ErrorCode::kNotFound);
  const auto listener = PacketListener::listen(path);
  ASSERT_TRUE(listener.has_value()) << listener.error().to_string();
  EXPECT_TRUE(PacketSocket::connect(path, soon()).has_value());
}

TEST(PacketListenerProcessTest, AnotherUsersConnectionIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const test::ShortTempDir dir;
  PacketListener listener = *PacketListener::listen(dir / "socket");
  // Open doors, so that the check of the uid itself is what refuses.
  ASSERT_EQ(::chmod(dir.path().c_str(), 0755), 0);
  ASSERT_EQ(::chmod((dir / "socket").c_str(), 0666), 0);
  ChildProcess stranger = start({"connect", (dir / "socket").native(), "65534"});
  // Its own check of our uid refuses, too.
  const auto line = stranger.read_line(soon());
  ASSERT_TRUE(line.has_value());
  EXPECT_THAT(*line, HasSubstr("uid"));
  const auto accepted = listener.try_accept();
  ASSERT_TRUE(accepted.has_value());
  EXPECT_FALSE(accepted->has_value());
}

}  // namespace
}  // namespace kvferry::ipc
